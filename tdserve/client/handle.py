"""The handle: a tensordict whose rows live on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.client.calls import SessionClient
from tdserve.client.description import StoreDescription
from tdserve.client.reading import read_selection
from tdserve.client.writing import write_selection
from tdserve.content import selected_spec
from tdserve.errors import InvalidRequestError, LocalProtocolError, SpecMismatchError
from tdserve.selection import Selection, encode
from tdserve.selection_torch import result_names
from tdserve.spec.capture import Captured, capture
from tdserve.spec.torch_types import to_torch
from tdserve.spec.tree import Node, Path, Spec, TensorLeaf, check_matches, show

_EVERYTHING = Selection()


class StoreHandle:
    """A tensordict store by name. Every access is a call to the server; what is read is a copy.

    So ``store["obs"][7] = x`` changes nothing on the server: use ``store.set_at_("obs", x, 7)`` or ``store[7] = td``.
    Each read is as of one moment; each write is seen whole or not at all. Threads: safe.
    """

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._client = client
        self._description = description
        self.name = description.name
        self.spec: Spec = description.spec

    def __repr__(self) -> str:
        return f"<StoreHandle {self.name!r} batch_size={list(self.batch_size)} at {self._client.address}>"

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the store."""
        return torch.Size(self.spec.batch_size)

    @property
    def shape(self) -> torch.Size:
        """Same as ``batch_size``."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.spec.batch_size)

    @property
    def device(self) -> torch.device | None:
        """Device of what is read: the CPU if the stored tensordict had a device, else None."""
        return None if self.spec.root.device is None else torch.device("cpu")

    @property
    def names(self) -> list[str | None]:
        """Names of the batch dimensions."""
        return list(self.spec.root.names or [None] * self.ndim)

    def keys(
        self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """The keys, as ``TensorDict.keys`` lists them; from the structure, which never changes."""
        return self.spec.keys(include_nested, leaves_only, sort=sort)

    def __contains__(self, key: object) -> bool:
        return key in self.spec.keys(include_nested=True)

    def __getitem__(self, index: Any) -> Any:
        """``store["key"]``, ``store["a", "b"]`` read a leaf or part; any other index reads rows of everything."""
        path = as_path(index)
        if path is not None:
            return self.get(path)
        return self._read(encode(index, batch_size=self.spec.batch_size, store=self.name))

    def __setitem__(self, index: Any, value: Any) -> None:
        """``store["key"] = tensor`` replaces a leaf or part, ``store[3] = td`` rows of everything."""
        path = as_path(index)
        if path is not None:
            self.set(path, value)
        else:
            self._write(encode(index, batch_size=self.spec.batch_size, store=self.name), value)

    def get(self, key: str | Path, default: Any = None, *, timeout_s: float | None = None) -> Any:
        """One leaf or nested part, whole.

        Args:
            key: Of a leaf (a tensor, or a non-tensor value) or of a nested tensordict.
            default: Returned when the store has no such key; without one KeyNotFoundError is raised, a KeyError.
        """
        path = _path(key)
        if default is not None and path not in _paths(self.spec):
            return default
        return self.get_at(path, ..., timeout_s=timeout_s)

    def get_at(self, key: str | Path, index: Any, *, timeout_s: float | None = None) -> Any:
        """Rows of one leaf or nested part."""
        path = _path(key)
        self.spec.find(path, store=self.name)
        selection = encode(index, batch_size=self.spec.batch_size, store=self.name)
        return _at(self._read(selection, keys=(path,), timeout_s=timeout_s), path)

    def set(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> StoreHandle:
        """Replaces one leaf or nested part."""
        return self.set_at_(key, value, ..., timeout_s=timeout_s)

    set_ = set

    def set_at_(self, key: str | Path, value: Any, index: Any, *, timeout_s: float | None = None) -> StoreHandle:
        """Writes rows of one leaf or nested part; a tensor is broadcast as ``leaf[index] = value`` would."""
        path = _path(key)
        self.spec.find(path, store=self.name)
        selection = encode(index, batch_size=self.spec.batch_size, store=self.name)
        chosen = selected_spec(self.spec, selection, (path,), store=self.name)
        self._commit(selection, _nested(value, path, chosen, self.name), chosen, (path,), timeout_s)
        return self

    def update_(self, values: Any, *, timeout_s: float | None = None) -> StoreHandle:
        """Replaces the leaves that ``values`` has, all of them together."""
        return self.update_at_(values, ..., timeout_s=timeout_s)

    def update_at_(self, values: Any, index: Any, *, timeout_s: float | None = None) -> StoreHandle:
        """Writes rows of the leaves that ``values`` has, all of them together."""
        selection = encode(index, batch_size=self.spec.batch_size, store=self.name)
        if isinstance(values, dict):
            batch_size = selection.result_batch_size(self.spec.batch_size)
            values = TensorDict(values, batch_size=list(batch_size))
        captured = capture(values, store=self.name)
        keys = [path for path, _ in (*captured.spec.tensors, *captured.spec.values)]
        chosen = selected_spec(self.spec, selection, keys, store=self.name)
        self._commit(selection, values, chosen, keys, timeout_s)
        return self

    def to_tensordict(self, *, device: torch.device | str | None = None, timeout_s: float | None = None) -> Any:
        """Everything, as a local tensordict."""
        return self._read(_EVERYTHING, device=device, timeout_s=timeout_s)

    def _read(
        self,
        selection: Selection,
        *,
        keys: Sequence[Path] = (),
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        deadline = self._client.deadline(timeout_s)
        content = read_selection(self._client, self.name, selection, keys=keys, spec=self.spec, deadline=deadline)
        if content is None:
            raise LocalProtocolError(reason="a read without newer_than brought nothing")
        td = content.build(device)
        names = result_names(self.spec.root.names, self.spec.batch_size, selection)
        if names is not None and isinstance(td, TensorDictBase):
            td.names = list(names)
        return td

    def _write(self, selection: Selection, value: Any) -> None:
        chosen = selected_spec(self.spec, selection, (), store=self.name)
        self._commit(selection, value, chosen, (), None)

    def _commit(
        self, selection: Selection, value: Any, chosen: Spec, keys: Sequence[Path], timeout_s: float | None
    ) -> None:
        captured = fitted(value, chosen, store=self.name)
        write_selection(
            self._client,
            self.name,
            selection,
            captured,
            keys=keys,
            fingerprint=self.spec.fingerprint,
            deadline=self._client.deadline(timeout_s),
        )


def fitted(value: Any, chosen: Spec, *, store: str) -> Captured:
    """A value taken apart, expanded to the batch size of what it replaces where it has fewer dimensions.

    Raises:
        SpecMismatchError: It does not fit; names the key, what was expected, what came.
    """
    if isinstance(value, dict):
        value = TensorDict(value, batch_size=list(chosen.batch_size))
    elif isinstance(value, (int, float, bool)) or (isinstance(value, torch.Tensor)):
        value = _filled(value, chosen, store)
    batch_size = tuple(getattr(value, "batch_size", ()))
    if batch_size != chosen.batch_size and len(batch_size) <= len(chosen.batch_size):
        try:
            value = value.expand(*chosen.batch_size)
        except (RuntimeError, ValueError, NotImplementedError):
            raise SpecMismatchError(
                store=store, key="", expected=f"batch size {list(chosen.batch_size)}", actual=f"{list(batch_size)}"
            ) from None
    captured = capture(value, store=store)
    check_matches(chosen, captured.spec, store=store)
    return captured


def _filled(value: Any, chosen: Spec, store: str) -> TensorDict:
    """A scalar or tensor written to every leaf, as ``td[index] = 0`` does."""
    filled = TensorDict({}, batch_size=list(chosen.batch_size))
    for path, leaf in chosen.tensors:
        filled[path] = _broadcast(value, leaf, path, store)
    return filled


def _broadcast(value: Any, leaf: TensorLeaf, path: Path, store: str) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    if tensor.dtype != to_torch(leaf.dtype):
        if isinstance(value, torch.Tensor):
            actual = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise SpecMismatchError(store=store, key=show(path), expected=f"{leaf.dtype}{list(leaf.shape)}", actual=actual)
        tensor = tensor.to(to_torch(leaf.dtype))
    try:
        return tensor.expand(leaf.shape)
    except RuntimeError:
        raise SpecMismatchError(
            store=store, key=show(path), expected=f"shape {list(leaf.shape)}", actual=f"{list(tensor.shape)}"
        ) from None


def _nested(value: Any, path: Path, chosen: Spec, store: str) -> TensorDict:
    """A tensordict that holds ``value`` at ``path`` and nothing else."""
    entry = chosen.find(path, store=store)
    nested = _empty_like(chosen.root, path)
    if isinstance(entry, TensorLeaf):
        value = _broadcast(value, entry, path, store)
    elif isinstance(entry, Node) and isinstance(value, dict):
        value = TensorDict(value, batch_size=list(entry.batch_size))
    _set_at(nested, path, value)
    return nested


def _empty_like(node: Node, path: Path) -> TensorDict:
    td = TensorDict({}, batch_size=list(node.batch_size))
    if len(path) > 1:
        child = dict(node.entries)[path[0]]
        assert isinstance(child, Node)
        td._set_str(path[0], _empty_like(child, path[1:]), validated=True, inplace=False, non_blocking=False)
    return td


def _set_at(td: TensorDict, path: Path, value: Any) -> None:
    for key in path[:-1]:
        td = td.get(key)
    td.set(path[-1], value) if isinstance(value, (torch.Tensor, TensorDictBase)) else td.set_non_tensor(path[-1], value)


def as_path(index: Any) -> Path | None:
    """A key as a path; None for what is no key."""
    if isinstance(index, str):
        return (index,)
    if isinstance(index, tuple) and index and all(isinstance(part, str) for part in index):
        return index
    return None


def _path(key: Any) -> Path:
    path = as_path(key)
    if path is None:
        raise InvalidRequestError(argument="key", reason=f"{key!r} is neither a str nor a tuple of str")
    return path


def _paths(spec: Spec) -> set[Path]:
    return {key if isinstance(key, tuple) else (key,) for key in spec.keys(include_nested=True)}


def _at(td: Any, path: Path) -> Any:
    for key in path:
        td = td.get(key)
    return td.data if type(td).__name__ == "NonTensorData" else td
