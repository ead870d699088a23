"""The calls of a handle that change which keys its store has, with tensordict's own names and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, NotSupportedError, WrongStateError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.handles.coerce import Manner, is_unset_field
from tdserve.client.handles.key_paths import NO_DEFAULT, check_path, to_path
from tdserve.client.handles.local_values import read_remote, to_local
from tdserve.client.handles.schema_changes import capture_addition, check_fields, split
from tdserve.client.handles.tensordict_calls import TensorDictCalls
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.store.rows.format import ROWS
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.trees.altering import Renaming
from tdserve.structure.trees.tree import Node, Path, Spec

if TYPE_CHECKING:
    from typing_extensions import Self


@leave_modes_in_calls
class AlterableHandle(TensorDictCalls):
    """A handle that can change the keys of its store.

    Every change becomes visible to all clients as a whole or not at all. Their handles notice it at their next call;
    tensors that were read or mapped before are unchanged. Threads: safe.

    All of these calls raise the following, and have changed nothing then: LockedError if the store is locked,
    SpecMismatchError for content that does not fit, NotSupportedError for content that cannot be stored, and for new
    keys in an adopted store, in a store whose rows differ in structure, or in a tensorclass.
    """

    # ------------------------------------------------------------ keys

    def set(
        self,
        key: str | Path,
        item: Any,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        timeout_s: float | None = None,
    ) -> Self:
        """Writes a leaf or nested part; if the store does not have it, adds it together with the nodes above it.

        An existing entry is overwritten in place and keeps its structure. A value of another shape or dtype, or a
        tensor in place of a nested part, is refused; remove the entry with ``del_`` first.

        Args:
            inplace: True also writes existing content of a locked store, as ``set_`` does.
            non_blocking: Accepted; the call returns when the content is stored.

        Raises:
            SpecMismatchError: The value does not fit. Nothing was written.
            LockedError: The store is locked. Nothing was written.
        """
        return self._set(check_path(key), item, inplace, self._store.make_deadline(timeout_s))

    def _set(self, path: Path, item: Any, inplace: bool, deadline: Deadline) -> Self:
        item = read_remote(item, deadline)

        def write() -> None:
            if not self._store.has(path):
                if item is not None or not is_unset_field(self.spec.root, path):
                    is_field = self.spec.root.tensorclass is not None and len(path) == 1  # may be a dict
                    is_value = is_field and isinstance(item, dict)
                    self._store.add({path: to_local(item, deadline)}, deadline, is_value=is_value)
                return
            if not inplace:
                self._store.check_unlocked(path[:-1])
            self._store.write_rows(..., item, at=path, manner=_choose_manner(inplace), deadline=deadline)

        if not self._store.has(path):
            self._store.refresh(deadline)
        self._store.retry_write(write, deadline)
        return self

    def set_non_tensor(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Self:
        """Sets one non-tensor value for all rows, at a new key or in place of an existing entry."""
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)

        def write() -> None:
            is_there = self._store.has(path)
            self._store.add({path: value}, deadline, is_value=True, replaces=[path] if is_there else ())

        if not self._store.has(path):
            self._store.refresh(deadline)
        self._store.retry_write(write, deadline)
        return self

    def setdefault(
        self, key: str | Path, default: Any, inplace: bool = False, *, timeout_s: float | None = None
    ) -> Any:
        """Returns the existing entry; if there is none, sets ``default`` and returns it as it was stored."""
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)
        try:
            found = self._read_entry(path, ..., NO_DEFAULT, deadline)
        except KeyNotFoundError:
            self._set(path, default, inplace, deadline)
            found = self._read_entry(path, ..., NO_DEFAULT, deadline)
        return self._store.hand_over(found)

    def create_nested(self, key: str | Path, *, timeout_s: float | None = None) -> Self:
        """Adds an empty nested tensordict; replaces an existing entry."""
        path, deadline = check_path(key), self._store.make_deadline(timeout_s)

        def write() -> None:
            node: Node = self.spec.root
            for part in path[:-1]:
                child = dict(node.entries).get(part)
                node = child if isinstance(child, Node) else node
            check_fields(self.spec, [path])
            empty = node._replace(entries=(), tensorclass=None, stack_dim=None)
            added = Spec(_nest_in(self.spec.root, path, empty))
            is_there = self._store.has(path)
            self._store.alter(zeros=added, replaces=[path] if is_there else (), deadline=deadline)

        self._store.retry_write(write, deadline)
        return self

    def update(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[str | Path] | None = None,
        timeout_s: float | None = None,
        **values: Any,
    ) -> Self:
        """Writes all leaves of a tensordict or dict in one write; adds those that the store lacks.

        Args:
            clone, non_blocking: Accepted; what is stored is a copy in any case.
            inplace: True also writes existing content of a locked store.
            keys_to_update: Only these keys, and what is below them.
            **values: More entries, by key.
        """
        deadline = self._store.make_deadline(timeout_s)
        given = _select_values(to_local(input_dict_or_td, deadline), keys_to_update)
        given = {**dict(given.items()), **to_local(values, deadline)} if values else given

        def write() -> None:
            known, fresh = split(self.spec, given)
            if not fresh:
                for path in known if not inplace else ():
                    self._store.check_unlocked(path[:-1])
                values = given if () in known else known
                self._store.write_rows(..., values, manner=_choose_manner(inplace), deadline=deadline)
                return
            self._store.add(fresh, deadline, known=known)

        if split(self.spec, given)[1]:
            self._store.refresh(deadline)
        self._store.retry_write(write, deadline)
        return self

    def pop(self, key: str | Path, default: Any = NO_DEFAULT, *, timeout_s: float | None = None) -> Any:
        """Removes a leaf or nested part, and returns it.

        Raises:
            KeyNotFoundError: The store has no such entry, and no default was given.
        """
        return self._pop(check_path(key), default, self._store.make_deadline(timeout_s))

    def _pop(self, path: Path, default: Any, deadline: Deadline) -> Any:
        try:
            value = self._read_entry(path, ..., NO_DEFAULT, deadline)
            self._remove([path], deadline)
        except KeyNotFoundError:
            if default is NO_DEFAULT:
                raise
            return default
        return self._store.hand_over(value)

    def popitem(self, *, timeout_s: float | None = None) -> tuple[str, Any]:
        """Removes the entry that was added last, and returns its key and its content.

        Raises:
            KeyNotFoundError: The store has no entries.
        """
        deadline = self._store.make_deadline(timeout_s)
        self._store.refresh(deadline)
        if not self.spec.root.entries:
            raise KeyNotFoundError(store=self.name, key="")
        key = self.spec.root.entries[-1][0]
        return key, self._pop((key,), NO_DEFAULT, deadline)

    def del_(self, key: str | Path, *, timeout_s: float | None = None) -> Self:
        """Removes a leaf or nested part. Raises KeyNotFoundError."""
        return self._remove([check_path(key)], self._store.make_deadline(timeout_s))

    def __delitem__(self, key: str | Path) -> None:
        self.del_(key)

    def clear(self, *, timeout_s: float | None = None) -> Self:
        """Removes all entries; the store and its batch size stay."""
        deadline = self._store.make_deadline(timeout_s)
        self._store.refresh(deadline)
        return self._remove([(key,) for key, _ in self.spec.root.entries], deadline)

    def rename_key_(
        self,
        old_key: str | Path,
        new_key: str | Path,
        safe: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Self:
        """Gives a leaf or nested part another key; nothing is copied.

        Args:
            safe: True refuses a ``new_key`` that exists; otherwise it is replaced.

        Raises:
            KeyExistsError: ``new_key`` exists.
            KeyNotFoundError: There is no ``old_key``.
        """
        old, new = check_path(old_key), check_path(new_key, argument="new_key")
        self._store.alter(renamed=[Renaming(old, new, safe)], deadline=self._store.make_deadline(timeout_s))
        return self

    def add_zeros(self, added: Spec, *, timeout_s: float | None = None) -> Self:
        """Adds leaves of zeros.

        Args:
            added: Their structure, with the store's batch size, and the nodes above them.

        Raises:
            StructureChangedError: One of them exists already. Nothing was changed.
        """
        self._store.alter(zeros=added, deadline=self._store.make_deadline(timeout_s))
        return self

    def _add_rows(self, index: Any, values: Any, deadline: Deadline) -> bool:
        """Adds keys for which only some rows are given; False if the store has one of them, or ``values`` is empty."""
        known, fresh = split(self.spec, values) if hasattr(values, "items") else ({}, {})
        if known or not fresh or self.spec.has_ragged:
            return False
        whole = TensorDict({}, self.spec.batch_size)
        try:
            whole[index] = values
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False
        self._store.retry_write(lambda: self._store.add(split(self.spec, whole)[1], deadline), deadline)
        return True

    def _keep_only(self, keys: Sequence[str | Path], *, strict: bool) -> None:
        """Performs ``select(..., inplace=True)``."""
        deadline = self._store.make_deadline(None)
        self._store.refresh(deadline)
        wanted = [check_path(key) for key in keys]
        for path in wanted if strict else ():
            self.spec.find(path, store=self.name)
        self._remove(list(_list_others(self.spec.root, (), wanted)), deadline)

    def _drop(self, keys: Sequence[str | Path]) -> None:
        """Performs ``exclude(..., inplace=True)``."""
        deadline = self._store.make_deadline(None)
        self._store.refresh(deadline)
        self._remove([path for path in map(check_path, keys) if self._store.has(path)], deadline)

    def _remove(self, paths: Sequence[Path], deadline: Deadline) -> Self:
        if paths:
            self._store.alter(removed=paths, deadline=deadline)
        return self

    # ------------------------------------------------------------ memory-mapped tensordicts

    def is_memmap(self) -> bool:
        """Returns True: every store is memory-mapped."""
        return True

    @property
    def saved_path(self) -> FilePath:
        """Folder on the server's machine that ``TensorDict.load_memmap`` opens; asks the server."""
        catalog = self._store.client.catalog
        return FilePath(catalog.get_server_stats().root) / catalog.describe(self.name).path / ROWS

    def memmap_refresh_(self, *, allow_pickle: bool | None = None, timeout_s: float | None = None) -> Self:
        """Updates which keys the store has after others added, removed or renamed some.

        Content is read again in any case.

        Raises:
            StoreNotFoundError: The store was deleted.
        """
        self._store.refresh(self._store.make_deadline(timeout_s))
        return self

    def load_memmap_(
        self,
        name: str | None = None,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
        timeout_s: float | None = None,
    ) -> Self:
        """Replaces what this store holds by what another holds.

        Keys that the other lacks are removed, as in tensordict.

        Args:
            name: Name of a store of the same batch size; None, or this store's name, only refreshes this handle.
            allow_pickle: Whether pickled values of the other are unpickled; None: as set for the client.

        Raises:
            StoreNotFoundError, SpecMismatchError, LockedError: This store is unchanged.
        """
        if name is None or name == self.name:
            return self.memmap_refresh_(timeout_s=timeout_s)
        deadline = self._store.make_deadline(timeout_s)
        found = require_content(read_selection(self._store.client, name, deadline=deadline, allow_pickle=allow_pickle))
        td = found.build()
        self._store.refresh(deadline)
        if not (_has_no_stack(self.spec) and _has_no_stack(found.spec)):
            return self._overwrite(td, deadline)
        entries: dict[Path, Any] = {(key,): get_entry(td, (key,)) for key, _ in found.spec.root.entries}
        content = capture_addition(self.spec, entries, store=self.name, allow_pickle=True)
        mine: list[Path] = [(key,) for key, _ in self.spec.root.entries]
        self._store.alter(
            content=content,
            replaces=[path for path in mine if path in entries],
            removed=[path for path in mine if path not in entries],
            deadline=deadline,
        )
        return self

    load_ = load_memmap_

    def load_memmap(
        self,
        name: str,
        device: Any = None,
        *,
        allow_pickle: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads a store by name into a local tensordict, as ``client.load_memmap(name)`` does."""
        deadline = self._store.make_deadline(timeout_s)
        found = read_selection(self._store.client, name, deadline=deadline, device=device, allow_pickle=allow_pickle)
        return require_content(found).build(device)

    load = load_memmap

    def make_memmap(
        self,
        key: str | Path,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Adds a tensor of zeros and the missing nodes above it, for all clients.

        Args:
            shape: Shape of the tensor; it begins with the store's batch size.
            dtype: By default torch's default one.

        Returns:
            The store's memory, if this client shares it with the server and may write to it. What is written there
            reaches the store at once, as after ``map(writable=True)``. Over the network, a copy as from every other
            read: ``set_at_`` writes.

        Raises:
            WrongStateError: The key exists. Nothing was changed.
            SpecMismatchError: The shape does not begin with the batch size. Nothing was changed.
            LockedError: The store is locked. Nothing was changed.
        """
        if isinstance(shape, torch.Tensor):
            reason = "set() takes a nested tensor"
            raise NotSupportedError(feature="make_memmap() with the shapes of a nested tensor", reason=reason)
        deadline = self._store.make_deadline(timeout_s)
        path = self._check_new_key(key, "make_memmap()", deadline)
        zero = torch.zeros((), dtype=dtype or torch.get_default_dtype())
        content = capture_addition(self.spec, {path: zero.expand(tuple(shape))}, store=self.name)
        self._store.alter(zeros=content.spec, deadline=deadline)
        return self._make_leaf(path, deadline)

    def make_memmap_from_tensor(
        self,
        key: str | Path,
        tensor: torch.Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Adds a copy of a tensor, as ``make_memmap`` adds zeros.

        Args:
            copy_data: False adds zeros of its shape and dtype.
            existsok: No effect, since a new key has no files yet.
        """
        if not copy_data and not tensor.is_nested:
            return self.make_memmap(key, tensor.shape, dtype=tensor.dtype, timeout_s=timeout_s)
        deadline = self._store.make_deadline(timeout_s)
        path = self._check_new_key(key, "make_memmap_from_tensor()", deadline)
        self._store.add({path: tensor.detach()}, deadline)
        return self._make_leaf(path, deadline)

    def make_memmap_from_storage(
        self,
        key: str | Path,
        storage: torch.UntypedStorage,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Adds a copy of the beginning of a storage, as ``make_memmap`` adds zeros.

        The store keeps a file of its own.
        """
        if isinstance(shape, torch.Tensor):
            reason = "set() takes a nested tensor"
            raise NotSupportedError(feature="make_memmap_from_storage() of a nested tensor", reason=reason)
        flat = torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=storage.device)
        size = torch.Size(shape)
        if size.numel() * flat.itemsize > storage.nbytes():
            reason = f"{storage.nbytes()} bytes are fewer than the {size.numel() * flat.itemsize} of {list(size)}"
            raise InvalidRequestError(argument="storage", reason=reason)
        tensor = flat.set_(storage)[: size.numel()].view(size)
        return self.make_memmap_from_tensor(key, tensor, timeout_s=timeout_s)

    def _overwrite(self, td: Any, deadline: Deadline) -> Self:
        """Overwrites rows of a store that has no keys of its own."""
        self._store.write_rows(..., td, manner=Manner.COPY, deadline=deadline)
        return self

    def _check_new_key(self, key: str | Path, event: str, deadline: Deadline) -> Path:
        path = check_path(key)
        self._store.refresh(deadline)
        if self._store.has(path):
            state = f"store {self.name!r} has the key {key!r} already (set() writes over it, del_() removes it)"
            raise WrongStateError(state=state, event=event)
        return path

    def _make_leaf(self, path: Path, deadline: Deadline) -> torch.Tensor:
        try:
            found = self._store.map(writable=True, deadline=deadline).get(path)
        except NotSupportedError:
            found = self._store.hand_over(self._read_entry(path, ..., None, deadline))
        made: torch.Tensor = found
        return made


def _choose_manner(inplace: bool) -> Manner:
    return Manner.BROADCAST_AFTER_BATCH if inplace else Manner.ENTRY


def _nest_in(root: Node, path: Path, entry: Node) -> Node:
    """Returns a root with a single entry and the nodes above it; a missing node is like the one above it."""
    if not path:
        return entry
    child = dict(root.entries).get(path[0]) if len(path) > 1 else None
    below = child if isinstance(child, Node) else root._replace(entries=(), tensorclass=None, stack_dim=None)
    return root._replace(entries=((path[0], _nest_in(below, path[1:], entry)),))


def _list_others(node: Node, path: Path, wanted: Sequence[Path]) -> Iterable[Path]:
    """Lists the entries that are neither wanted nor above a wanted one."""
    for key, entry in node.entries:
        below = (*path, key)
        if below in wanted:
            continue
        if isinstance(entry, Node) and any(each[: len(below)] == below for each in wanted):
            yield from _list_others(entry, below, wanted)
        else:
            yield below


def _select_values(values: Any, keys: Sequence[str | Path] | None) -> Any:
    if values is None:
        return {}
    if not hasattr(values, "items"):
        raise InvalidRequestError(argument="update", reason=f"{type(values).__name__} has no keys")
    if keys is None:
        return values
    wanted = [check_path(key) for key in keys]
    found: dict[Any, Any] = {}
    for key, value in values.items():
        path = to_path(key) or ()
        if any(path[: len(each)] == each for each in wanted):
            found[key] = value
            continue
        below = [each[len(path) :] for each in wanted if each[: len(path)] == path]
        if below and hasattr(value, "items"):
            found[key] = _select_values(value, below)
    return found


def _has_no_stack(spec: Spec) -> bool:
    """Returns whether keys can be added to a structure and removed from it: it has no lazy stack."""
    return spec.root.stack_dim is None and spec.root.inner is None
