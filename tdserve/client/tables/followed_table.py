"""A table as its handle has it, which follows it: rows get leaves, or another table has its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    KeyNotFoundError,
    SpecMismatchError,
    StoreNotFoundError,
    StructureChangedError,
    TooLargeError,
)
from tdserve.client.session.by_address import ByAddress, OfProcess
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.requests.outgoing import WriteTarget
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.extends.extend_coalescer import ExtendCoalescer
from tdserve.client.tables.extends.given_rows import suggest_form
from tdserve.client.tables.new_leaves import check_leaves
from tdserve.client.tables.retype_table import find_current_description
from tdserve.client.tables.table_counts import LastCounts
from tdserve.messages.store_kinds import MEANT_NAMES
from tdserve.rules.replay.settings import Settings
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import control_pb2

T = TypeVar("T")


class FollowedTable(ByAddress):
    """What is known of a table, as of the last look. Threads: safe. Processes: safe, as its handle.

    Args:
        client: Through which it is followed.
        description: The table.
        kind: Kind of store that each request names, so that the server refuses it if the name has another kind by
            now.

    Attributes:
        name: Name of the store.
        kind: Kind of the store.
        uid: Which table of this name it is.
        capacity: Rows.
        spec: Structure of one row.
        stored: Structure of the table. Another object as soon as the table has changed.
        num_dims: Dimensions of a batch of rows.
        settings: Sampler, remover and limiter.
        added_columns: Columns that samples add; the second list is that of samples with ``group_by``.
        counts: Live rows and inserts as of the last answer.
        is_in_use: Whether rows are written, or were.
        is_part: Whether it is a part of a shared table, whose row numbers depend on the capacity of each part: then
            no table of another capacity is followed.
    """

    def __init__(self, client: SessionClient, description: StoreDescription, kind: control_pb2.StoreKind) -> None:
        self._client = client
        self.name = description.name
        self.kind = kind
        self.is_part = False
        self.capacity = description.capacity
        self.follow(description)

    @property
    def client(self) -> SessionClient:
        """This process's client."""
        return self._client

    @property
    def wait_s(self) -> float:
        """Default of every call that can wait, seconds."""
        return self._client.timeout_s

    @property
    def meant(self) -> dict[str, Any]:
        """What requests about rows say of the table that is meant: its kind, and the capacity, 0 for any."""
        return {"kind": self.kind, "capacity": self.capacity if self.is_part else 0}

    @property
    def shown_kind(self) -> str:
        """The kind of the table, for people."""
        return MEANT_NAMES[self.kind]

    _of_process: ClassVar[tuple[str, ...]] = ("_client", "coalescer")

    @OfProcess
    def coalescer(self) -> ExtendCoalescer:
        """Sends rows; made again when the table is."""
        target = WriteTarget(self.name, self.stored.fingerprint, self.stored, allow_pickle=self._client.allow_pickle)
        return ExtendCoalescer.from_table(
            self._client, target, self.settings, self.capacity, counts=self.counts, uid=self.uid
        )

    def follow(self, description: StoreDescription) -> None:
        """Makes this the table with this description.

        Raises:
            StructureChangedError: It is a part, and the table has another capacity.
        """
        if self.is_part and description.capacity != self.capacity:
            expected, actual = f"{self.capacity} rows", f"{description.capacity}, since it was made anew: open it again"
            raise StructureChangedError(store=self.name, key="", expected=expected, actual=actual)
        self.capacity = description.capacity
        self.uid = description.uid
        self.is_in_use = description.inserts > 0
        self.counts = LastCounts(description.num_rows, description.inserts)
        self._take_settings(description)
        self._take_structure(description)
        self.__dict__.pop("coalescer", None)  # at last: another thread may make it at any moment

    def _take_settings(self, description: StoreDescription) -> bool:
        """Has the table's settings of now; returns whether samples have other columns by them."""
        before = getattr(self, "added_columns", None)
        self.settings = Settings.from_json(description.settings)
        self.added_columns = [self.settings.list_added_columns(is_grouped=flag) for flag in (False, True)]
        return self.added_columns != before

    def _take_structure(self, description: StoreDescription) -> None:
        # In this order, for other threads: who sees one of them sees those before it.
        self.num_dims = 1 + len(description.spec.batch_size)
        self.spec: Spec = description.spec
        self.stored = self.spec.prepend((self.capacity,))
        self._fitting: tuple[Spec | None, tuple[Path, ...]] = (None, ())
        self._structure = description.structure

    def check_fits(self, spec: Spec) -> tuple[Path, ...]:
        """Returns the keys that rows of this structure have, none if they have all. Raises if they do not fit."""
        fitting, keys = self._fitting
        if spec is fitting:
            return keys
        batch_size = spec.batch_size
        if len(batch_size) != self.num_dims:
            expected = f"batch size {['n', *self.spec.batch_size]}"
            hint = suggest_form(len(batch_size) - self.num_dims, self.spec)
            raise SpecMismatchError(store=self.name, key="", expected=expected, actual=f"{list(batch_size)}{hint}")
        expected_spec = self.stored.with_rows(batch_size[0])
        keys = ()
        found = {path for path, _ in (*spec.tensors, *spec.values)}
        if found and found < set(self.spec.leaf_paths):
            keys = tuple(path for path in self.spec.leaf_paths if path in found)
            expected_spec = expected_spec.select(keys, store=self.name)
        # Without the missing leaves some nodes may be empty.
        given = spec.select(keys, store=self.name) if keys else spec
        check_leaves(expected_spec, given, store=self.name)
        if batch_size[0] > self.capacity:
            raise TooLargeError(what=f"rows of one extend of {self.name!r}", asked=batch_size[0], free=self.capacity)
        self._fitting = spec, keys  # the writer's next batch probably has the same structure
        return keys

    def check_key(self, path: Path, deadline: Deadline) -> None:
        """Raises KeyNotFoundError if rows have no such key, not even one that came later."""
        try:
            self.spec.find(path, store=self.name)
        except KeyNotFoundError:
            if not self.follow_changed(deadline):
                raise
            self.spec.find(path, store=self.name)

    def follow_and_retry(self, act: Callable[[], T], deadline: Deadline, *, uses_rows: bool = True) -> T:
        """Runs ``act``, again if the table has got leaves or was recreated in between, with another capacity or for
        ragged rows.

        Args:
            deadline: Deadline of the call, of which all of this is a step.
            uses_rows: Whether its success shows that rows are written, or were.
        """
        while True:
            stored = self.stored
            try:
                result = act()
                break
            except (StoreNotFoundError, SpecMismatchError, KeyNotFoundError) as error:
                found = None
                if not self.is_in_use:
                    found = find_current_description(self._client, self.name, self.spec, deadline, kind=self.shown_kind)
                if found is not None:
                    self.follow(found)
                elif isinstance(error, StoreNotFoundError) or not self.has_followed(stored, deadline):
                    raise
        self.is_in_use |= uses_rows
        return result

    def follow_changed(self, deadline: Deadline) -> bool:
        """Follows a table that has got leaves, or was deleted and created again for the same rows; returns whether it
        did.

        Otherwise only the settings are those of now, by which samples may have other columns; that counts too.

        Raises:
            WrongStateError: A store of another kind has its name.
        """
        found = self._client.catalog.describe_existing(self.name, deadline).check_kind(self.shown_kind)
        has_leaves = found.uid == self.uid and found.structure != self._structure
        # The capacity of the structure, which comes last: another thread may be following the same table.
        is_recreated = found.spec == self.spec and found.capacity != self.stored.num_rows
        if has_leaves:
            self._take_structure(found)
            self.coalescer.follow(self.stored)
        elif is_recreated:
            self.follow(found)
        elif found.spec == self.spec:
            has_changed = self._take_settings(found)
            return self._drop_outdated_coalescer() or has_changed
        return has_leaves or is_recreated

    def _drop_outdated_coalescer(self) -> bool:
        """Drops what sends rows if it is for another table than this one is: a thread may have begun to make it before
        another one has followed. Returns whether it did."""
        made: ExtendCoalescer | None = self.__dict__.get("coalescer")
        if made is None or made.stored is self.stored:
            return False
        self.__dict__.pop("coalescer", None)
        return True

    def renew(self, query: Query, deadline: Deadline) -> Query | None:
        """Returns the query of a sample for a table that has changed; None if it is what it was."""
        if not self.has_followed(query.stored, deadline):
            return None
        return replace(query, stored=self.stored, added=self.added_columns[query.group_by is not None])

    def has_followed(self, stored: Spec, deadline: Deadline) -> bool:
        """Returns whether this one, perhaps in another thread, follows a table that has changed since it had this
        structure."""
        return self.stored is not stored or self.follow_changed(deadline) or self.stored is not stored
