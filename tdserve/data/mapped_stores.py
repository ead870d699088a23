"""The stores that this process, a data worker or a local client, has mapped, by their incarnation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import (
    ClosedError,
    CorruptDataError,
    LocalProtocolError,
    ReadOnlyError,
    StoreNotFoundError,
    TransferAbortedError,
)
from tdserve.messages.layout import Layout
from tdserve.rules.catalog import DEFAULT_MAX_OBJECT_BYTES, explain_read_only, make_identity
from tdserve.rules.replay.allocation.ring import compute_first_generation
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.allocation.uncommitted_rows import OwnUncommittedRows
from tdserve.store.durability.row_comparison import RowComparison, is_compared
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.mapping import open_leaves
from tdserve.store.values import object_folders
from tdserve.store.values.entry_tables import EntryTables
from tdserve.store.values.objects import Objects
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Path, Spec
from tdserve.transport.sources_sinks import view_rows
from tdserve.v1 import control_pb2, spec_pb2, worker_pb2


@dataclass
class MappedStore:
    """One mapped store.

    Attributes:
        name: Its name.
        uid: Incarnation: a store that is deleted and created again has another.
        spec: As stored, rows included.
        leaves: The mapped tensors by path.
        generations: One number per row, then one for the store as a whole; read only.
        writes_values: Whether this is the one process that writes non-tensor values.
        max_object_bytes: Size limit of these values, for that process.
        read_only: Why the store may not be written; "" when it may.
        plans: Kept plans of reads, by expression.
        tables: Tables of a keyed store, with the environment that they belong to.
        structure: Number of the structure whose files are mapped.
        row_values_nbytes: Size of the non-tensor values of a row, as of the last rows that were read.
        used_at: Turn of the cache at which it was last asked for.
        lacks_values: Whether this process cannot read its values.
        keeps: What its folder's path needs, as long as the store is mapped.
    """

    name: str
    uid: str
    folder: FilePath
    spec: Spec
    leaves: dict[Path, torch.Tensor]
    generations: Generations
    writes_values: bool
    plans: dict[bytes, Any] = field(default_factory=dict)
    max_object_bytes: int = DEFAULT_MAX_OBJECT_BYTES
    read_only: str = ""
    structure: int = 0
    row_values_nbytes: int = 0
    used_at: int = 0
    lacks_values: bool = False
    keeps: object = None
    tables: tuple[Objects, EntryTables] | None = None
    _objects: tuple[int, Objects] | None = None
    _writable_generations: Generations | None = None
    _tables: dict[Path, NDArray[np.uint8]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @cached_property
    def identity(self) -> str:
        """Names the store and the structure that is mapped, as ``OpenedStore.identity`` does."""
        return make_identity(self.uid, self.structure)

    @property
    def is_current(self) -> bool:
        """Whether the store still exists with the structure that is mapped."""
        return self.generations.is_current(self.structure)

    @property
    def is_gone(self) -> bool:
        """Whether these files are not used any more: the store was deleted, or has moved."""
        try:
            return self.generations.is_deleted
        except ClosedError:
            return True

    def check_current(self) -> None:
        """Raises TransferAbortedError, which asks for a retry, if the store is no longer what was mapped."""
        if not self.is_current:
            raise TransferAbortedError(transfer=0, reason=f"store {self.name!r} was altered or deleted meanwhile")

    @cached_property
    def row_nbytes(self) -> int:
        """Size of the tensors of one row."""
        return self.spec.nbytes // max(self.spec.batch_size[0], 1) if self.spec.batch_size else self.spec.nbytes

    @cached_property
    def value_batch_sizes(self) -> dict[Path, tuple[int, ...]]:
        """Batch size of every non-tensor leaf by path."""
        return {path: leaf.batch_size for path, leaf in self.spec.values}

    def check_writable(self) -> None:
        """Raises ReadOnlyError if the store may not be written."""
        if self.read_only:
            raise ReadOnlyError(store=self.name, reason=self.read_only)

    def map_writable_generations(self) -> NDArray[np.int64]:
        """Returns the rows' generations in a writable mapping, for a writer that claims rows.

        Raises:
            InvalidRequestError, CorruptDataError: This process may not write them, or they are gone.
            TransferAbortedError: The store was deleted.
        """
        return self._open_writable_generations().values

    @cached_property
    def shared(self) -> SharedNumbers:
        """The shared numbers of a table, to be read."""
        return SharedNumbers(self.generations.numbers)

    @cached_property
    def writable_shared(self) -> SharedNumbers:
        """The shared numbers of a table, for a writer or reader that works by itself. Errors as in
        ``map_writable_generations``."""
        return SharedNumbers(self._open_writable_generations().numbers)

    @cached_property
    def uncommitted(self) -> OwnUncommittedRows:
        """The rows of a table that this process has filled, and that are not committed yet."""
        return OwnUncommittedRows(compute_first_generation(self.uid))

    @cached_property
    def is_table(self) -> bool:
        """Whether it is a table of rows."""
        return self.shared.is_table

    @cached_property
    def kind(self) -> control_pb2.StoreKind:
        """Which kind of store a request for its rows means."""
        if not self.is_table:
            return control_pb2.STORE_KIND_TENSORDICT
        return control_pb2.STORE_KIND_QUEUE if self.shared.is_queue else control_pb2.STORE_KIND_REPLAY

    def is_of_kind(self, number: int) -> bool:
        """Returns whether this is the kind of store that a request names; 0 names none."""
        return not number or number == self.kind

    @cached_property
    def row_generations(self) -> NDArray[np.int64]:
        """The generations of a table's rows, without the store's own."""
        return self.generations.values[:-1]

    def _open_writable_generations(self) -> Generations:
        opened = self._writable_generations
        if opened is None:
            try:
                opened = Generations.open(self.folder / GENERATION_FILE, uid=self.uid, writable=True)
            except CorruptDataError:
                self.check_current()  # it was deleted just now: its files are gone
                raise
            self._writable_generations = opened
        return opened

    def get_leaves(self, layout: Layout) -> list[torch.Tensor]:
        """Returns the mapped tensors in the order of a layout's slots."""
        return [self.leaves[slot.path] for slot in layout.slots[: layout.num_leaves]]

    def get_tables(self, layout: Layout) -> list[NDArray[np.uint8]]:
        """Returns the bytes of the mapped tensors by rows, in the order of a layout's slots; kept for the next call."""
        return [self.get_table(slot.path) for slot in layout.slots[: layout.num_leaves]]

    def get_table(self, path: Path) -> NDArray[np.uint8]:
        """Returns the bytes of a mapped tensor by rows, uint8 ``[num_rows, row_nbytes]``."""
        tables = self._tables
        if not tables:
            has_rows = bool(self.spec.batch_size)  # else all of it is one row
            tables.update({each: view_rows(leaf if has_rows else leaf[None]) for each, leaf in self.leaves.items()})
        return tables[path]

    @cached_property
    def compares_rows(self) -> bool:
        """Whether it was created with ``checksum=True``, and this process can read all that the checksums are of."""
        return not (self.lacks_values and self.spec.values) and is_compared(self.folder)

    @cached_property
    def _comparison(self) -> RowComparison:
        return RowComparison(self.spec, self.folder, self.generations, self.structure)

    def compare_rows(self, rows: NDArray[np.int64], *, looks_again: bool = False) -> None:
        """Compares rows with their checksums of the last sync, if the store was created with ``checksum=True``.

        Args:
            looks_again: As for ``RowComparison.compare``.

        Raises:
            DamagedRowError: One is damaged.
        """
        if self.compares_rows:
            tables = {path: self.get_table(path) for path in self.leaves}
            objects = self.open_objects(writable=False) if self.spec.values else None
            self._comparison.compare(rows, tables, objects, looks_again=looks_again)

    @property
    def value_address_bytes(self) -> int:
        """Size of the mapping of its values, which takes address space only."""
        return self.max_object_bytes if self.spec.values else 0

    def open_objects(self, *, writable: bool) -> Objects | None:
        """Returns the non-tensor values; None if none was ever written and the caller only reads.

        The process that writes them always opens them for writing, since it could not open them a second time.
        """
        epoch = self.generations.objects_epoch
        opened = self._objects
        if opened is None or opened[0] != epoch:
            with self._lock:
                opened = self._objects = self._open_objects(writable)
        return None if opened is None else opened[1]

    def _open_objects(self, writable: bool) -> tuple[int, Objects] | None:
        opened = self._objects
        while True:
            epoch = self.generations.objects_epoch
            if opened is not None and opened[0] == epoch:
                return opened
            folder = object_folders.get_folder(self.folder, epoch)
            self._check_present()
            if not writable and not Objects.exists(folder):
                return None
            try:
                writes = writable or self.writes_values
                found = epoch, Objects(folder, writable=writes, max_bytes=self.max_object_bytes)
                self._check_present()  # once more: the folder may belong to the next store of this name
                return found
            except CorruptDataError:
                if self.generations.objects_epoch == epoch:  # otherwise they have just moved
                    raise

    def _check_present(self) -> None:
        if self.generations.is_deleted:
            raise StoreNotFoundError(name=self.name)

    def open_writable_objects(self) -> Objects:
        """Returns the non-tensor values, created if there are none; only for the one worker that writes them."""
        objects = self.open_objects(writable=True)
        if objects is None:
            raise LocalProtocolError(reason=f"no values could be opened in {self.folder}")
        return objects

    def close(self) -> None:
        """Drops the mappings; tensors still in use keep theirs."""
        self.generations.close()
        self._objects = self.tables = None  # closed when the last thread that reads them has finished


MAX_MAPPED_STORES = 4096
MAX_MAPPINGS = 16_384
"""Limits of a cache: a quarter of the mappings that a process may have. One store of more leaves may exceed them."""

MAX_VALUE_BYTES = 1 << 45
"""The same limit for the maps of values: a quarter of the address space of a process. That of a keyed store without
``max_bytes`` is as large as the disk."""

KEPT_FRACTION = 0.75
"""Fraction of the limits that is kept when one is exceeded, so that most stores are mapped without looking at all."""


class OpenStores:
    """The cache of mapped stores. Threads: safe; the first thread that needs a store opens it.

    If there are too many, those not asked for the longest are dropped. A caller that uses one keeps it mapped.

    Args:
        writes_values, lacks_values: As in MappedStore.
        is_read_only: Whether tensors are mapped for reading only.
        max_stores: Most stores.
        max_mappings: Most mappings of leaves.
        max_value_bytes: Most address space of their values.
    """

    def __init__(
        self,
        *,
        writes_values: bool,
        lacks_values: bool = False,
        is_read_only: bool = False,
        max_stores: int = MAX_MAPPED_STORES,
        max_mappings: int = MAX_MAPPINGS,
        max_value_bytes: int = MAX_VALUE_BYTES,
    ) -> None:
        self._writes_values = writes_values
        self._lacks_values = lacks_values
        self._is_read_only = is_read_only
        self._max_stores = max_stores
        self._max_mappings = max_mappings
        self._max_value_bytes = max_value_bytes
        self._num_mappings = self._value_bytes = 0
        self._turn = 0
        self._lock = Lock()
        self._stores: dict[str, MappedStore] = {}
        self._readable: dict[str, MappedStore] = {}
        self._specs: dict[bytes, Spec] = {}
        self._specs_before: dict[bytes, Spec] = {}

    def learn(self, fingerprint: bytes, message: spec_pb2.Spec) -> None:
        """Remembers a structure that control has sent; called before the order itself is queued."""
        if fingerprint not in self._specs:
            self._specs[fingerprint] = codec.decode(message)

    def forget_specs(self) -> None:
        """Forgets structures, except those received since the last call, which waiting orders may name. Control then
        sends every structure again."""
        self._specs, self._specs_before = {}, self._specs

    def get_spec(self, fingerprint: bytes) -> Spec:
        """Returns the structure with this fingerprint."""
        spec = self._specs.get(fingerprint) or self._specs_before.get(fingerprint)
        if spec is None:
            raise LocalProtocolError(reason="control names a spec that this process has not received")
        return spec

    def find(self, uid: str) -> MappedStore | None:
        """Returns the store of this incarnation if it is mapped; one that has moved away and back has other files."""
        store = self._stores.get(uid)
        return None if store is None or store.is_gone else self._note_use(store)

    def _note_use(self, store: MappedStore | None) -> MappedStore | None:
        if store is not None:
            self._turn = store.used_at = self._turn + 1  # threads may take the same turn
        return store

    def get(
        self, ref: worker_pb2.StoreRef, spec: Spec | None = None, *, name: str = "", keeps: object = None
    ) -> MappedStore:
        """Returns the store of a reference, and maps it if necessary.

        Args:
            spec: Its structure, in its own order of keys; None takes the structure that was learnt, in any order.
            name: Its name; by default that of its folder.
            keeps: Kept as long as it is mapped.

        Raises:
            CorruptDataError: Its files are missing or damaged.
            StoreNotFoundError: It was deleted since.
            TransferAbortedError: It has another structure now.
        """
        store = self.find(ref.uid)
        if store is not None and store.structure == ref.structure:
            return store
        spec = spec or self.get_spec(ref.fingerprint)
        with self._lock:
            store = self._stores.get(ref.uid)
            if store is None or store.structure != ref.structure or store.is_gone:
                opened = self._open(ref, spec, name or FilePath(ref.folder).name)
                opened.keeps = keeps
                self._remove(ref.uid)
                self._make_room(opened)
                store = self._stores[ref.uid] = opened
                self._num_mappings += len(store.leaves)
                self._value_bytes += store.value_address_bytes
            self._note_use(store)
            return store

    def _make_room(self, store: MappedStore) -> None:
        """Drops the stores that were not used for the longest, if there are too many for another one."""
        if self._has_room(store, 1.0):
            return
        for uid, _ in sorted(self._stores.items(), key=lambda item: item[1].used_at):
            if self._has_room(store, KEPT_FRACTION):
                return
            self._remove(uid)

    def _has_room(self, store: MappedStore, fraction: float) -> bool:
        """Returns whether another store stays within this fraction of the limits."""
        return (
            len(self._stores) < fraction * self._max_stores
            and self._num_mappings + len(store.leaves) <= fraction * self._max_mappings
            and self._value_bytes + store.value_address_bytes <= fraction * self._max_value_bytes
        )

    def _remove(self, uid: str) -> MappedStore | None:
        store = self._stores.pop(uid, None)
        if store is not None:
            self._num_mappings -= len(store.leaves)
            self._value_bytes -= store.value_address_bytes
            if self._readable.get(store.name) is store:
                del self._readable[store.name]
        return store

    def remember_readable(self, store: MappedStore) -> None:
        """Remembers that control has let a client read this store: its name refers to this store, until its files show
        that it was deleted or altered."""
        with self._lock:
            if self._stores.get(store.uid) is store:  # else it was dropped meanwhile
                self._readable[store.name] = store

    def find_readable(self, name: str) -> MappedStore | None:
        """Returns the store of a name, of any kind, if control has let a client read it and it has not been deleted or
        altered since."""
        store = self._readable.get(name)
        try:
            return None if store is None or not store.is_current else self._note_use(store)
        except ClosedError:  # just dropped
            return None

    def drop(self, uid: str) -> None:
        """Drops a store that was deleted."""
        with self._lock:
            store = self._remove(uid)
        if store is not None:
            store.close()

    def forget_deleted(self) -> None:
        """Drops stores that were deleted, since their space is not free while they are mapped."""
        with self._lock:
            for uid, store in list(self._stores.items()):
                if store.generations.is_deleted:
                    self._remove(uid)

    def close(self) -> None:
        """Drops all stores. Reads in other threads finish; mappings are released with their last reader."""
        with self._lock:
            self._stores = {}
            self._readable = {}
            self._num_mappings = 0

    def _open(self, ref: worker_pb2.StoreRef, spec: Spec, name: str) -> MappedStore:
        folder = FilePath(ref.folder)
        generations = Generations.open(folder / GENERATION_FILE, uid=ref.uid, writable=False)
        adopted = Adopted.load(folder)
        read_only = explain_read_only(adopted.path) if adopted is not None and adopted.read_only else ""
        try:
            leaves = open_leaves(folder, spec, writable=not (self._is_read_only or read_only))
        except CorruptDataError:
            _check_structure(generations, ref, name)
            raise
        _check_structure(generations, ref, name)
        if generations.is_deleted:  # the folder may already belong to the next store of this name
            raise StoreNotFoundError(name=name)
        max_object_bytes = ref.max_object_bytes or DEFAULT_MAX_OBJECT_BYTES
        return MappedStore(
            name,
            ref.uid,
            folder,
            spec,
            leaves,
            generations,
            self._writes_values,
            max_object_bytes=max_object_bytes,
            read_only=read_only,
            structure=ref.structure,
            lacks_values=self._lacks_values,
        )


def _check_structure(generations: Generations, ref: worker_pb2.StoreRef, name: str) -> None:
    """Raises unless the files belong to the structure that is meant: its number changes before the files do."""
    if generations.structure != ref.structure:
        raise TransferAbortedError(transfer=0, reason=f"the structure of store {name!r} changed meanwhile")
