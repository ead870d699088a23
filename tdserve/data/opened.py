"""Stores that this process, a data worker or a local client, has mapped, by the identity of their incarnation."""

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
from tdserve.rules.catalog import DEFAULT_MAX_OBJECT_BYTES, why_read_only
from tdserve.store import object_folders
from tdserve.store.adopted import Adopted
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.mapping import open_leaves
from tdserve.store.objects import Objects
from tdserve.structure import codec
from tdserve.structure.tree import Path, Spec
from tdserve.transport.sources_sinks import row_table
from tdserve.v1 import spec_pb2, worker_pb2


@dataclass
class MappedStore:
    """One mapped store.

    Attributes:
        uid: Incarnation: a deleted and recreated store has another.
        spec: As stored, rows included.
        leaves: The mapped tensors by path.
        generations: One number per row, then one for the store as a whole; read only.
        writes_values: Whether this is the one process that writes non-tensor values.
        max_object_bytes: Size that they may grow to, for that process.
        read_only: Why the store may not be written; "" when it may.
        plans: Reads that were worked out, by their expression.
        structure: Number of the structure whose files are mapped.
    """

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
    _objects: tuple[int, Objects] | None = None
    _writable_generations: NDArray[np.int64] | None = None
    _tables: dict[Path, NDArray[np.uint8]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        """Name of the store; its folder has the same."""
        return self.folder.name

    @property
    def is_current(self) -> bool:
        """Whether the store was not deleted, and has not got another structure, since it was mapped."""
        return not self.generations.is_deleted and self.generations.structure == self.structure

    def check_current(self) -> None:
        """Raises TransferAbortedError, which asks to try again, once the store is not what was mapped."""
        if not self.is_current:
            raise TransferAbortedError(transfer=0, reason=f"store {self.name!r} was altered or deleted meanwhile")

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of the tensors of one row."""
        return self.spec.nbytes // max(self.spec.batch_size[0], 1) if self.spec.batch_size else self.spec.nbytes

    @cached_property
    def value_batch_sizes(self) -> dict[Path, tuple[int, ...]]:
        """Batch size of every non-tensor leaf by path."""
        return {path: leaf.batch_size for path, leaf in self.spec.values}

    def check_writable(self) -> None:
        """Raises ReadOnlyError unless the store may be written."""
        if self.read_only:
            raise ReadOnlyError(store=self.name, reason=self.read_only)

    def writable_generations(self) -> NDArray[np.int64]:
        """The rows' generations, mapped once more: for who takes rows by himself.

        Raises:
            InvalidRequestError, CorruptDataError: This process may not write them, or they are gone.
        """
        opened = self._writable_generations
        if opened is None:
            path = self.folder / GENERATION_FILE
            opened = self._writable_generations = Generations.open(path, uid=self.uid, writable=True).values
        return opened

    def leaves_of(self, layout: Layout) -> list[torch.Tensor]:
        """The mapped tensors in the order of a layout's slots."""
        return [self.leaves[slot.path] for slot in layout.slots[: layout.num_leaves]]

    def tables_of(self, layout: Layout) -> list[NDArray[np.uint8]]:
        """The bytes of the mapped tensors by rows, in the order of a layout's slots; kept for next time."""
        return [self.table(slot.path) for slot in layout.slots[: layout.num_leaves]]

    def table(self, path: Path) -> NDArray[np.uint8]:
        """The bytes of a mapped tensor by rows, uint8 ``[num_rows, row_nbytes]``."""
        tables = self._tables
        if not tables:
            tables.update({each: row_table(leaf) for each, leaf in self.leaves.items()})
        return tables[path]

    def objects(self, *, writable: bool) -> Objects | None:
        """The non-tensor values; None when none was ever written (and the caller only reads).

        The process that writes them opens them for writing in any case: it could not open them a second time.
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
            folder = object_folders.current(self.folder, epoch)
            self._check_present()
            if not writable and not Objects.exists(folder):
                return None
            try:
                writes = writable or self.writes_values
                found = epoch, Objects(folder, writable=writes, max_bytes=self.max_object_bytes)
                self._check_present()  # once more: the folder may be of the next store of this name
                return found
            except CorruptDataError:
                if self.generations.objects_epoch == epoch:  # else they have moved just now
                    raise

    def _check_present(self) -> None:
        if self.generations.is_deleted:
            raise StoreNotFoundError(name=self.name)

    def writable_objects(self) -> Objects:
        """The non-tensor values, made if there are none; only in the one worker that writes them."""
        objects = self.objects(writable=True)
        if objects is None:
            raise LocalProtocolError(reason=f"no values could be opened in {self.folder}")
        return objects

    def close(self) -> None:
        """Drops the mappings; tensors still in use keep theirs."""
        self.generations.close()
        self._objects = None  # closed when the last thread that reads them is done


class OpenStores:
    """The cache. Threads: safe; a store is opened once, by the first that needs it.

    Args:
        writes_values: As in MappedStore.
        is_read_only: Whether tensors are mapped for reading only.
    """

    def __init__(self, *, writes_values: bool, is_read_only: bool = False) -> None:
        self._writes_values = writes_values
        self._is_read_only = is_read_only
        self._lock = Lock()
        self._stores: dict[str, MappedStore] = {}
        self._granted: dict[str, MappedStore] = {}
        self._specs: dict[bytes, Spec] = {}
        self._specs_before: dict[bytes, Spec] = {}

    def learn(self, fingerprint: bytes, message: spec_pb2.Spec) -> None:
        """Remembers a structure that control has sent along; called before the order itself is queued."""
        if fingerprint not in self._specs:
            self._specs[fingerprint] = codec.decode(message)

    def forget_specs(self) -> None:
        """Control will tell every structure again. Orders that wait may name what it has told since the last time."""
        self._specs, self._specs_before = {}, self._specs

    def spec(self, fingerprint: bytes) -> Spec:
        """The structure with this fingerprint."""
        spec = self._specs.get(fingerprint) or self._specs_before.get(fingerprint)
        if spec is None:
            raise LocalProtocolError(reason="control names a spec that this process was never told")
        return spec

    def find(self, uid: str) -> MappedStore | None:
        """The store of this incarnation, if it is mapped already."""
        return self._stores.get(uid)

    def get(self, ref: worker_pb2.StoreRef, spec: Spec | None = None) -> MappedStore:
        """The store of a reference, mapped.

        Args:
            spec: Its structure, in its own order of keys; None takes the one that was learnt, in any order.

        Raises:
            CorruptDataError: Its files are missing or damaged.
            StoreNotFoundError: It was deleted while it was mapped.
            TransferAbortedError: It has another structure by now.
        """
        store = self._stores.get(ref.uid)
        if store is not None and store.structure == ref.structure:
            return store
        spec = spec or self.spec(ref.fingerprint)
        with self._lock:
            store = self._stores.get(ref.uid)
            if store is None or store.structure != ref.structure:
                store = self._stores[ref.uid] = self._open(ref, spec)
            return store

    def grant(self, store: MappedStore) -> None:
        """Control has let somebody read this store: its name means this one, until its files say otherwise."""
        self._granted[store.name] = store

    def granted(self, name: str) -> MappedStore | None:
        """The tensordict store of a name, if control has let somebody read it and it was not deleted or altered
        since."""
        store = self._granted.get(name)
        try:
            return None if store is None or not store.is_current else store
        except ClosedError:  # dropped just now
            return None

    def drop(self, uid: str) -> None:
        """Forgets a store that was deleted."""
        with self._lock:
            store = self._stores.pop(uid, None)
            if store is not None and self._granted.get(store.name) is store:
                del self._granted[store.name]
        if store is not None:
            store.close()

    def forget_deleted(self) -> None:
        """Forgets those that were deleted: while they are mapped, their space is not free."""
        with self._lock:
            for uid, store in list(self._stores.items()):
                if store.generations.is_deleted:
                    del self._stores[uid]
                    if self._granted.get(store.name) is store:
                        del self._granted[store.name]

    def close(self) -> None:
        """Forgets all of them; who reads one in another thread goes on, and what it has open goes with the last."""
        with self._lock:
            self._stores = {}
            self._granted = {}

    def _open(self, ref: worker_pb2.StoreRef, spec: Spec) -> MappedStore:
        folder = FilePath(ref.folder)
        generations = Generations.open(folder / GENERATION_FILE, uid=ref.uid, writable=False)
        adopted = Adopted.load(folder)
        read_only = why_read_only(adopted.path) if adopted is not None and adopted.read_only else ""
        try:
            leaves = open_leaves(folder, spec, writable=not (self._is_read_only or read_only))
        except CorruptDataError:
            _check_structure(generations, ref, folder.name)
            raise
        _check_structure(generations, ref, folder.name)
        if generations.is_deleted:  # what lies in the folder by now may be of the next store of this name
            raise StoreNotFoundError(name=folder.name)
        max_object_bytes = ref.max_object_bytes or DEFAULT_MAX_OBJECT_BYTES
        return MappedStore(
            ref.uid,
            folder,
            spec,
            leaves,
            generations,
            self._writes_values,
            max_object_bytes=max_object_bytes,
            read_only=read_only,
            structure=ref.structure,
        )


def _check_structure(generations: Generations, ref: worker_pb2.StoreRef, name: str) -> None:
    """Raises unless the files that lie there now are of the structure that is meant: their number changes first."""
    if generations.structure != ref.structure:
        raise TransferAbortedError(transfer=0, reason=f"the structure of store {name!r} changed meanwhile")
