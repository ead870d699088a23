"""The calls of memory-mapped tensordicts on a handle, whose leaves are mapped files on the server."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError, WrongStateError
from tdserve.client.handles.coerce import Manner
from tdserve.client.handles.keys import check_path
from tdserve.client.handles.schema_calls import AlterableHandle
from tdserve.client.handles.schema_changes import addition
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.store.format import ROWS
from tdserve.structure.entries import entry_at
from tdserve.structure.tree import Path, Spec

if TYPE_CHECKING:
    from typing_extensions import Self


class MemmappedHandle(AlterableHandle):
    """A handle with tensordict's own calls on memory-mapped tensordicts."""

    def map(self, *, writable: bool = False, timeout_s: float | None = None) -> Any:
        """Maps the store's own memory."""
        raise NotImplementedError

    def is_memmap(self) -> bool:
        """Returns True: every store is memory-mapped."""
        return True

    @property
    def saved_path(self) -> FilePath:
        """Folder on the server's machine that ``TensorDict.load_memmap`` opens; asks the server."""
        return FilePath(self._client.catalog.server_stats().root) / self._client.catalog.describe(self.name).path / ROWS

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Updates which keys the store has after others added, removed or renamed some.

        Content is read anew in any case.

        Raises:
            StoreNotFoundError: The store was deleted.
        """
        self.refresh()
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
            name: Of the other store, of the same batch size; None, or this store's name, only refreshes this handle.
            allow_pickle: Whether pickled values of the other are unpickled; None: as set for the client.

        Raises:
            StoreNotFoundError, SpecMismatchError, LockedError: This store is unchanged.
        """
        if name is None or name == self.name:
            return self.memmap_refresh_()
        deadline = self._client.deadline(timeout_s)
        found = require_content(read_selection(self._client, name, deadline=deadline, allow_pickle=allow_pickle))
        td = found.build()
        self.refresh()
        if not (_is_plain(self.spec) and _is_plain(found.spec)):
            return self._overwritten(td, timeout_s)
        entries: dict[Path, Any] = {(key,): entry_at(td, (key,)) for key, _ in found.spec.root.entries}
        content = addition(self.spec, entries, store=self.name, allow_pickle=True)
        mine: list[Path] = [(key,) for key, _ in self.spec.root.entries]
        self._alter(
            content=content,
            replaces=[path for path in mine if path in entries],
            removed=[path for path in mine if path not in entries],
            timeout_s=deadline.remaining_s,
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
        deadline = self._client.deadline(timeout_s)
        found = read_selection(self._client, name, deadline=deadline, device=device, allow_pickle=allow_pickle)
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
            shape: Of the tensor; it begins with the store's batch size.
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
        path = self._checked_new(key, "make_memmap()", timeout_s)
        zero = torch.zeros((), dtype=dtype or torch.get_default_dtype())
        content = addition(self.spec, {path: zero.expand(tuple(shape))}, store=self.name)
        self.add_zeros(content.spec, timeout_s=timeout_s)
        return self._make_leaf(path, timeout_s)

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
        path = self._checked_new(key, "make_memmap_from_tensor()", timeout_s)
        self._add({path: tensor.detach()}, timeout_s)
        return self._make_leaf(path, timeout_s)

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

    def _overwritten(self, td: Any, timeout_s: float | None) -> Self:
        """Overwrites rows of a store that has no keys of its own."""
        self.write_rows(..., td, manner=Manner.COPY, timeout_s=timeout_s)
        return self

    def _checked_new(self, key: str | Path, event: str, timeout_s: float | None) -> Path:
        path = check_path(key)
        self.refresh(timeout_s=timeout_s)
        if self._has(path):
            state = f"store {self.name!r} has the key {key!r} already (set() writes over it, del_() removes it)"
            raise WrongStateError(state=state, event=event)
        return path

    def _make_leaf(self, path: Path, timeout_s: float | None) -> torch.Tensor:
        try:
            found = self.map(writable=True, timeout_s=timeout_s).get(path)
        except NotSupportedError:
            found = self.get(path)
        made: torch.Tensor = found
        return made


def _is_plain(spec: Spec) -> bool:
    """Returns whether keys can be added to a structure and removed from it: it has no lazy stack."""
    return spec.root.stack_dim is None and spec.root.inner is None
