"""One open store in the control process: its record, its rules and its waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import (
    KeyNotFoundError,
    NotSupportedError,
    ReadOnlyError,
    StructureChangedError,
    WrongStateError,
)
from tdserve.messages.row_sets import RowSet
from tdserve.messages.store_kinds import MEANT_NAMES, QUEUE, make_kind_error
from tdserve.rules.catalog import StoreRecord, explain_read_only, make_identity
from tdserve.rules.kv.keyed_state import KeyedState
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.table import Table
from tdserve.rules.weights import Versions
from tdserve.server.execution.waiting import Waiters
from tdserve.server.open_store.weight_readers import Readers
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.recovery.lost_rows import LostRows
from tdserve.store.rows.generations import Generations
from tdserve.store.values import object_folders
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Path, Spec, quote
from tdserve.v1 import worker_pb2


@dataclass
class OpenedStore:
    """An open store.

    Attributes:
        record: Its record in the catalog.
        spec: Structure as stored, rows included (tensordict, replay); of weights: that of the newest version.
        folder: Folder of its files.
        row_spec: For a replay table: structure of one row, as the user gave it.
        generations: Writable mapping; None for weights.
        table: Rules of a replay table.
        versions: Rules of weights.
        readers: For weights: who has read which version.
        waiters: Waiters for changes of its rows, content or versions.
        write_lock: Serialises writes to a tensordict store.
        link_lock: Held while rows of one extend are linked to trajectories: no others may come between them.
        view_lock: Serialises the creation of a table's selectors.
        owner_session: Number of the session that fills it for the first time.
        is_filling: Whether a request of that session is filling it now.
        is_hidden: Whether writes of that session fill it, each with some of its rows, until it ends the filling.
        filling: What the client that fills it so has named that.
        group_keys: Leaves by whose values samples have asked for groups of rows; new rows bring these values along.
        known_groups: The ``group_keys`` whose values are known for all rows.
        lost: Rows that report DATA_LOSS.
        writes: Rows that are being overwritten now, one set per write.
        unfilled: Rows that were claimed before a restart and not committed, with the record of their claim.
        keyed: State of a keyed store.
        used_at: Turn of ``OpenedStores`` at which it was last asked for.
        synced_version: For weights: the version that a loss of power would lead back to, whose file is kept as it is.
            0: none.
        is_outdated: Whether the table has got leaves since: another object, which shares its rules, has its place.
            Requests that have begun with this one may read, and commit the rows that they have reserved.
        is_restructuring: Whether files of the structure that it has since a restart still wait for room.
        is_leaving: Whether it is being moved to another server: rows are not claimed any more.
    """

    record: StoreRecord
    spec: Spec
    folder: FilePath
    row_spec: Spec | None = None
    generations: Generations | None = None
    table: Table | None = None
    versions: Versions | None = None
    keyed: KeyedState | None = None
    readers: Readers = field(default_factory=Readers)
    waiters: Waiters = field(default_factory=Waiters)
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    link_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    view_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owner_session: int = 0
    is_filling: bool = False
    is_hidden: bool = False
    filling: str = ""
    group_keys: list[Path] = field(default_factory=list)
    known_groups: set[Path] = field(default_factory=set)
    lost: LostRows = field(default_factory=LostRows)
    writes: list[RowSet] = field(default_factory=list)
    unfilled: list[tuple[ClaimRecord, list[Reservation]]] = field(default_factory=list)
    synced_version: int = 0
    used_at: int = 0
    is_outdated: bool = False
    is_restructuring: bool = False
    is_leaving: bool = False

    @property
    def name(self) -> str:
        """Name of the store."""
        return self.record.name

    @property
    def identity(self) -> str:
        """Names the store and the structure that it has now."""
        return make_identity(self.record.uid, self.record.structure)

    def get_table(self) -> Table:
        """Returns a table's rules. Raises WrongStateError for another kind of store."""
        if self.table is None:
            raise self.make_kind_error("replay")
        return self.table

    def catch_up(self, writer: bytes = b"") -> None:
        """Commits the rows that writers have filled by themselves. A request does so before it looks at the
        table, so that no reader sees less than the writers were promised.

        Args:
            writer: Only those among which may be extends of the client with this id.
        """
        if self.table is not None:
            self.table.state.catch_up(writer)

    def get_versions(self) -> Versions:
        """Returns the rules of weights. Raises WrongStateError for another kind of store."""
        if self.versions is None:
            raise self.make_kind_error("weights")
        return self.versions

    def get_keyed(self) -> KeyedState:
        """Returns the state of a keyed store. Raises WrongStateError for another kind of store."""
        if self.keyed is None:
            raise self.make_kind_error("keyed")
        return self.keyed

    def check_writable(self) -> None:
        """Raises ReadOnlyError if the store refuses every write."""
        if self.record.read_only:
            raise ReadOnlyError(store=self.name, reason=explain_read_only(self.record.adopted))

    def check_values_writable(self, keys: Sequence[Path]) -> None:
        """Raises NotSupportedError for a write to non-tensor leaves at or below ``keys`` (none: all) of an adopted
        store: the user's folder would keep the old values."""
        path = self.record.adopted
        found = self.spec.select(keys, store=self.name).values if path and keys else self.spec.values if path else ()
        if found:
            reason = (
                f"{path} keeps it in meta.json, which stays as it is, and nothing was written; write the tensors by "
                "their keys alone, or copy the store with client.memmap(store.to_tensordict(), name) to change it"
            )
            written = f"writing the non-tensor value {quote(found[0][0])} of adopted store {self.name!r}"
            raise NotSupportedError(feature=written, reason=reason)

    def check_present(self) -> None:
        """Raises StoreNotFoundError if the store was deleted, and StoreMovedError if it is sealed or elsewhere: nothing
        that is not decided yet may be committed to it."""
        self.waiters.check_present()

    def check_current(self) -> None:
        """Like ``check_present``, and raises StructureChangedError if a table has got leaves since."""
        self.check_present()
        if self.is_outdated:
            raise self.make_older_store_error()

    def hold_synced(self, marked: Iterable[int]) -> None:
        """Keeps a version's file until the next sync releases it; called for weights that were just opened.

        Args:
            marked: Versions that have reached the disk. The newest one of them that has a file is kept, else the newest
                of all.
        """
        versions = self.get_versions()
        newest = [] if versions.newest is None else [versions.newest.version]
        self.synced_version = next(filter(versions.hold, (*sorted(marked, reverse=True), *newest)), 0)

    def make_kind_error(self, wanted: str) -> WrongStateError:
        """Returns the error for a call that asks for another kind of store."""
        return make_kind_error(self.name, self.shown_kind, wanted=wanted)

    @property
    def shown_kind(self) -> str:
        """The kind that people see, and requests mean: a table whose rows are taken is a queue."""
        return QUEUE if self.table is not None and self.table.settings.is_queue else self.record.kind

    def is_of_kind(self, number: int) -> bool:
        """Returns whether this is the kind of store that a request names; 0 names none."""
        return not number or MEANT_NAMES.get(number) == self.shown_kind

    def check_kind(self, number: int) -> None:
        """Raises WrongStateError if a request means another kind of store: its client has opened one of that kind
        under this name, and a structure may fit both."""
        if not self.is_of_kind(number):
            raise self.make_kind_error(MEANT_NAMES.get(number, "later"))

    def check_capacity(self, capacity: int) -> None:
        """Raises StructureChangedError if a request means a table of another capacity, on which the numbers of the rows
        depend of a table that several servers share; 0 means any."""
        if capacity and capacity != self.record.capacity:
            raise self.make_older_store_error()

    def make_older_store_error(self) -> StructureChangedError:
        """Returns the error for a client with the structure or capacity that it, or an earlier store of this name,
        had."""
        expected = "the structure and the capacity that it has now"
        actual = "those that it had before, or of an older table of this name; open it again"
        return StructureChangedError(store=self.name, key="", expected=expected, actual=actual)

    def get_row_spec(self) -> Spec:
        """Returns the structure of one row of a replay table. Raises WrongStateError for another kind of store."""
        if self.row_spec is None:
            raise self.make_kind_error("replay")
        return self.row_spec

    @property
    def rule_keys(self) -> tuple[Path, ...]:
        """Leaves whose bytes the rules of a replay table read."""
        if self.table is None:
            return ()
        return tuple(dict.fromkeys((*self.table.settings.sampler.trajectory_keys, *self.group_keys)))

    @property
    def leaf_names(self) -> list[str]:
        """Names of the leaves that a row may lack, as used in messages, by their numbers."""
        return [quote(path) for path in self._leaf_numbers]

    @property
    def _leaf_numbers(self) -> dict[Path, int]:
        """Leaves that came after the creation have none: every row has them."""
        added = self.record.added_leaves
        numbers: dict[Path, int] | None = self.spec.memo.get(("numbers", added))
        if numbers is None:
            paths = [path for path, _ in (*self.spec.tensors, *self.spec.values) if path not in added]
            numbers = self.spec.memo["numbers", added] = {path: number for number, path in enumerate(paths)}
        return numbers

    def find_numbers(self, path: Path) -> list[int]:
        """Returns the numbers of the leaves that a row may lack at or below a key, tensors first. Raises
        KeyNotFoundError."""
        numbers = self._leaf_numbers
        if path in numbers:
            return [numbers[path]]
        found = [number for leaf, number in numbers.items() if leaf[: len(path)] == path]
        if not found and not any(leaf[: len(path)] == path for leaf in self.record.added_leaves):
            raise KeyNotFoundError(store=self.name, key=".".join(path))
        return found

    def choose_numbers(self, keys: Sequence[Path]) -> list[int] | None:
        """Returns the numbers of the leaves of rows that have these keys (none: all); None if they lack no leaf. Raises
        KeyNotFoundError."""
        found = sorted({number for key in keys for number in self.find_numbers(key)})
        return None if not keys or len(found) == len(self._leaf_numbers) else found

    def get_generation_values(self) -> NDArray[np.int64]:
        """Returns the mapped generations: one per row, then the store's own. Raises WrongStateError for weights."""
        if self.generations is None:
            raise self.make_kind_error("tensordict or replay")
        return self.generations.values

    def get_table_state(self) -> dict[str, Any]:
        """Returns what the rules of a replay table need after a restart."""
        known = [path for path in self.group_keys if path in self.known_groups]
        return {**self.get_table().state.get_state(), **({"group_keys": known} if known else {})}

    @property
    def content_version(self) -> int:
        """As the property of the generations."""
        return self.generations.content_version if self.generations is not None else 0

    def count_bytes(self) -> int:
        """Returns the size of the leaves and of the file of values."""
        if self.generations is None or not self.spec.values:
            return self.spec.nbytes
        return self.spec.nbytes + object_folders.count_bytes(self.folder, self.generations.objects_epoch)

    def make_ref(self, known_specs: WorkerSpecCache) -> worker_pb2.StoreRef:
        """Returns the reference to this store for orders to a worker, with the structure if the worker lacks it."""
        fingerprint = self.spec.fingerprint
        ref = worker_pb2.StoreRef(
            uid=self.record.uid,
            folder=str(self.folder),
            fingerprint=fingerprint,
            max_object_bytes=self.record.max_object_bytes,
            structure=self.record.structure,
        )
        if known_specs.must_include(self.spec):
            ref.spec.CopyFrom(codec.encode(self.spec))
        return ref
