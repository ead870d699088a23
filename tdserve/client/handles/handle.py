"""The handle: a tensordict whose rows live on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SpecMismatchError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.datasets.dataset import iter_rows
from tdserve.client.handles.coerce import Manner
from tdserve.client.handles.key_paths import NO_DEFAULT, check_path, to_path
from tdserve.client.handles.live_stores import with_live_leaves
from tdserve.client.handles.local_values import read_remote, to_local
from tdserve.client.handles.schema_calls import AlterableHandle
from tdserve.client.handles.schema_changes import find_unknown
from tdserve.client.handles.skeletons import Skeleton, get_skeleton
from tdserve.client.handles.store_client import StoreClient
from tdserve.client.handles.view import StoreView, unwrap_leaf
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.catalog.structure_text import format_repr
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.selection.items import split_index
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.trees.nodes import count_dims
from tdserve.structure.trees.tree import Path, Spec, ValueLeaf, show

if TYPE_CHECKING:
    from typing_extensions import Self


@leave_modes_in_calls
class StoreHandle(AlterableHandle):
    """A tensordict store by name. Every access is a call to the server, and every read returns a copy.

    After the store was deleted it means the next tensordict store of its name; while a store of another kind has the
    name, calls raise WrongStateError.

    So ``store["obs"][7] = x`` changes nothing on the server: use ``store.set_at_("obs", x, 7)`` or ``store[7] = td``. A
    read shows the store at one moment; a write becomes visible as a whole or not at all. Threads: safe. Processes:
    safe, whether the handle is pickled (by address) or forked; a ``DataLoader`` accepts a store as a dataset.

    In a store that was created with ``share_non_tensor=True``, non-tensor leaves that are read by key, slice or int are
    live: each access to their value reads the store again, and in-place updates are written to it.
    """

    _undone_next: bool | None = None
    _undone_at_exits: tuple[bool | None, ...] = ()

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._store = StoreClient(client, description)

    @property
    def spec(self) -> Spec:
        """The store's structure, when this handle last read it."""
        return self._store.spec

    @property
    def uid(self) -> str:
        """Incarnation of the store, read together with ``spec``."""
        return self._store.uid

    @property
    def shares_non_tensor(self) -> bool:
        """Whether non-tensor leaves that are read are live."""
        return self._store.shares_non_tensor

    def __repr__(self) -> str:
        """Shows the structure that this handle last read; sends no request."""
        header = f"{self.name!r} at {self._store.client.address}"
        return format_repr(header, self.spec.root, kind="StoreHandle", device=self.device)

    def refresh(self, *, timeout_s: float | None = None) -> bool:
        """Asks the server for the store's structure; returns whether it differs from the one in this handle.

        Raises:
            StoreNotFoundError: The store was deleted.
        """
        return self._store.refresh(self._store.make_deadline(timeout_s))

    @property
    def is_locked(self) -> bool:
        """Whether the store's keys are locked for all clients; asks the server."""
        self.refresh()
        return self.spec.root.is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self._set_lock(bool(value), None)

    def lock_(self, *, timeout_s: float | None = None) -> Self:
        """Locks the store's keys for all clients until ``unlock_``. Content can still be written in place.

        ``with store.lock_(): ...`` unlocks it at the end.
        """
        return self._set_lock(True, timeout_s)

    def unlock_(self, *, timeout_s: float | None = None) -> Self:
        """Unlocks the store's keys for all clients. ``with store.unlock_(): ...`` locks it again at the end."""
        return self._set_lock(False, timeout_s)

    def _set_lock(self, is_locked: bool, timeout_s: float | None) -> Self:
        is_changed = self._store.set_locked(is_locked, self._store.make_deadline(timeout_s))
        self._undone_next = (not is_locked) if is_changed else None
        return self

    def __enter__(self) -> Self:
        """Enters ``with store.lock_():`` or ``with store.unlock_():``; the end of the block undoes the change."""
        self._undone_at_exits = (*self._undone_at_exits, self._undone_next)
        self._undone_next = None
        return self

    def __exit__(self, *_: object) -> None:
        *rest, undone = self._undone_at_exits
        self._undone_at_exits = tuple(rest)
        if undone is not None:
            self._set_lock(undone, None)

    def _renew_structure(self, deadline: Deadline | None = None) -> None:
        self._store.refresh(self._store.make_deadline(None) if deadline is None else deadline)

    def _read_item(self, index: Any) -> Any:
        path = to_path(index)
        if path is not None:
            leaf = self._store.read_small_leaf(path)
            if leaf is not None:
                return leaf
            deadline = self._store.make_deadline(None)
            entry = self._store.retry(lambda: self.spec.find(path, store=self.name), deadline)
            if isinstance(entry, ValueLeaf):
                return unwrap_leaf(get_entry(self._store.read_at(path, ..., deadline), path))
            return self._read_entry(path, ..., NO_DEFAULT, deadline)
        below = None
        if self.spec.root.inner:  # batch dimensions that only the elements have
            index, below = split_index(index, len(self.spec.batch_size), self.ndim)
        found = self._read_rows(index)
        return found if below is None else found[below]

    def _read_rows(self, index: Any, *, numbered_in: tuple[int, ...] | None = None) -> Any:
        found = self._store.read(index, numbered_in=numbered_in, deadline=self._store.make_deadline(None))
        return self._add_live_leaves(found, index)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads a whole batch in one call, as a ``DataLoader`` does: ``store[indices]``.

        In a worker of a ``DataLoader`` it is in shared memory, from where the main process takes it without a copy.
        """
        self._store.read_into_shared_memory()
        return self._read_item(list(indices))

    def __iter__(self) -> Iterator[Any]:
        """Yields the rows, as ``iter(td)`` does, read in blocks; each block is as of one moment.

        Raises:
            TypeError: The store has no batch dimension.
            SpecMismatchError: Between two blocks it was replaced by a store with another number of rows.
        """
        self.refresh()
        batch_size = self.spec.batch_size
        if not batch_size and self.spec.root.inner:  # one piece: only its content has the dimensions
            return map(self._store.hand_over, self._read_item(...))
        if not batch_size:
            raise TypeError(
                f"iteration over store {self.name!r}, which has no batch dimension; items() has its entries"
            )
        read = partial(self._read_rows, numbered_in=batch_size)
        return map(self._store.hand_over, iter_rows(read, batch_size[0], self.spec.nbytes))

    def _read_batch(self, rows: Any, numbered_in: tuple[int, ...], pad: Pad, deadline: Deadline) -> Any:
        return self._store.read(rows, numbered_in=numbered_in, pad=pad, deadline=deadline)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces a leaf or nested part (``store["key"] = tensor``) or rows of everything (``store[3] = td``).

        If the store has none of the keys of ``td``, they are added, as in tensordict; the other rows are zero.
        """
        path = to_path(index)
        if path is not None:
            self.set(path, value)
            return
        uid, deadline = self.uid, self._store.make_deadline(None)
        value = to_local(value, deadline)
        try:
            self._update_at(value, index, deadline)
        except SpecMismatchError:
            # No key is added to another store of this name: the caller may not mean that one.
            if self.uid != uid or not self._add_rows(index, value, deadline):
                raise

    def get(self, key: str | Path, default: Any = None, *, pad: Pad = None, timeout_s: float | None = None) -> Any:
        """Reads a whole leaf or nested part.

        Args:
            key: Key of a leaf or of a nested tensordict. A non-tensor leaf is returned as NonTensorData or
                NonTensorStack, as by ``TensorDict.get``; ``store[key]`` returns the value itself.
            default: Returned when the store has no such key, as ``TensorDict.get`` does; ``store[key]`` raises
                KeyNotFoundError, a KeyError.
            pad: Pads ragged tensors with this number to the longest of them; None leaves them ragged.
        """
        path = check_path(key)
        found = self._store.read_small_leaf(path) if pad is None and timeout_s is None else None
        if found is None:
            found = self._read_entry(path, ..., default, self._store.make_deadline(timeout_s), pad)
        return self._store.hand_over(found)

    def get_at(
        self,
        key: str | Path,
        index: Any,
        default: Any = None,
        *,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads rows of a leaf or nested part, or returns the default as ``get`` does.

        An index may extend beyond the batch dimensions. Then whole rows are fetched and indexed here.
        """
        found = self._read_entry(check_path(key), index, default, self._store.make_deadline(timeout_s), pad)
        return self._store.hand_over(found)

    def _read_entry(self, path: Path, index: Any, default: Any, deadline: Deadline, pad: Pad = None) -> Any:
        try:
            entry = self._store.retry(lambda: self.spec.find(path, store=self.name), deadline)
            index, below = split_index(index, len(self.spec.batch_size), count_dims(entry))
            found = get_entry(self._add_live_leaves(self._store.read_at(path, index, deadline, pad), index), path)
            return found if below is None else found[below]
        except KeyNotFoundError:
            if default is NO_DEFAULT:
                raise
            return default

    def snapshot_at(self, key: str | Path, index: Any, *, timeout_s: float | None = None) -> Any:
        """Reads as ``get_at`` does; the result is never live."""
        path = check_path(key)
        return get_entry(self._store.read_at(path, index, self._store.make_deadline(timeout_s)), path)

    def set_(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> StoreHandle:
        """Replaces an existing leaf or nested part, also in a locked store."""
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)
        value = read_remote(value, deadline)
        self._store.write_rows(..., value, at=path, manner=Manner.BROADCAST_AFTER_BATCH, deadline=deadline)
        return self

    def _prepare_write_of_rows(
        self, path: Path, value: Any, index: Any, deadline: Deadline
    ) -> Callable[[], StoreHandle]:
        def write() -> StoreHandle:
            self._store.write_rows(index, read_remote(value, deadline), at=path, deadline=deadline)
            return self

        return write

    def _update(self, values: Any, deadline: Deadline) -> None:
        try:
            self._store.write_rows(..., values, manner=Manner.COPY, deadline=deadline)
        except SpecMismatchError as error:
            unknown = find_unknown(self.spec, values)
            if unknown is None:
                raise
            raise KeyNotFoundError(store=self.name, key=show(unknown)) from error

    def _update_at(self, values: Any, index: Any, deadline: Deadline) -> None:
        self._store.write_rows(index, values, deadline=deadline)

    def to_tensordict(
        self,
        *,
        retain_none: bool | None = None,
        device: torch.device | str | None = None,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads everything into a local tensordict; never live.

        With ``pad`` ragged tensors are padded to the longest of them, and ``("masks", *key)`` marks what is content. A
        tensorclass takes ``retain_none`` as ``to_tensordict`` of an instance does.
        """
        found = self._store.read(..., device=device, pad=pad, deadline=self._store.make_deadline(timeout_s))
        return found if retain_none is None else found.to_tensordict(retain_none=retain_none)

    def _read_all(self, deadline: Deadline, *, device: torch.device | str | None = None) -> Any:
        return self._store.read(..., device=device, deadline=deadline)

    def _get_skeleton(self) -> Skeleton:
        self._store.renew(self._store.make_deadline(None))
        return get_skeleton(self.spec)

    def _add_step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("inplace") and name == "select":
            self._keep_only(args, strict=kwargs.get("strict", True))
        elif kwargs.get("inplace") and name == "exclude":
            self._drop(args)
        else:
            deadline = self._store.make_deadline(None)
            return self._store.retry(lambda: StoreView(self._store)._add_step(name, args, kwargs), deadline)
        return self

    def _cut(self, dim: int, pieces: Sequence[int | slice], cut: Sequence[Any]) -> tuple[StoreView, ...]:
        return StoreView(self._store)._cut(dim, pieces, cut)

    def _add_live_leaves(self, td: Any, index: Any) -> Any:
        return with_live_leaves(td, self, index) if self.shares_non_tensor else td

    def map(
        self,
        fn: Callable[[Any], Any] | None = None,
        dim: int = 0,
        num_workers: int | None = None,
        *,
        writable: bool = False,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Maps the store's own memory as a locked tensordict.

        Nothing is copied, and later writes of any client are visible.

        Rows may change, or be half written, while they are read here; a normal read returns rows of one moment.
        Non-tensor values are those of this moment, unless the store shares them (``share_non_tensor=True``). This needs
        transport ``shm``. After the store is deleted the tensordict keeps the last content.

        Args:
            fn: With a function this is ``TensorDict.map`` of a local copy instead, with its further arguments.
            dim, num_workers: As in ``TensorDict.map``.
            writable: False: writes into the tensors stay in this process. True: they reach the store at once; the
                server does not notice, the store's version stays, and other readers are not warned.

        Raises:
            NotSupportedError: This client does not share memory with the server, or its user may not write to it.
            PermissionDeniedError: The client's token may only read, and ``writable`` is True.
            InvalidRequestError: Arguments of ``TensorDict.map`` without a function.
        """
        if fn is not None:
            return self._perform("map", fn, dim, num_workers, timeout_s=timeout_s, **kwargs)
        if kwargs:
            raise InvalidRequestError(argument=next(iter(kwargs)), reason="it is for TensorDict.map, with a function")
        found = self._store.map(writable=writable, deadline=self._store.make_deadline(timeout_s))
        return self._add_live_leaves(found, ...)
