"""Values and rows that are built when they are first read.

Until then the non-tensor values and lazy stacks of a read stay bytes. The tensordicts below are instances of
tensordict's own classes, and become plain ones when they are first read; only the time of building differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack

from tdserve.structure.tensordict_private import UNMADE_STATE, UnmadeHooks, become, show_as
from tdserve.structure.torch_private import pytree

Make = Callable[[], LazyStackedTensorDict]

MIN_ROWS = 32
"""Fewer rows than this are built at once, which takes a few microseconds."""


class Deferred(Sequence[Any]):
    """A list that is decoded when an element is first read. Threads: safe; at worst it is decoded twice.

    Args:
        blobs: Encoded elements.
        decode: Decodes all of them at once.
    """

    def __init__(self, blobs: Sequence[bytes], decode: Callable[[Sequence[bytes]], list[Any]]) -> None:
        self._blobs = blobs
        self._decode = decode
        self._items: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._blobs)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice) and self._items is None:
            return Deferred(self._blobs[index], self._decode)
        return self.items[index]

    def __setitem__(self, index: int, item: Any) -> None:
        self.items[index] = item

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    @property
    def items(self) -> list[Any]:
        """Returns the elements."""
        if self._items is None:
            self._items = self._decode(self._blobs)
        return self._items


class _Unmade(UnmadeHooks):
    """A stack whose rows are not built yet; its ``__dict__`` has ``_make``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # tensordict makes further stacks by ``type(stack)(...)``.
        return _PLAIN[cls](*args, **kwargs)

    @property
    def tensordicts(self) -> Any:  # type: ignore[override]  # it stands for an attribute
        """The rows."""
        return materialise(self).tensordicts

    def find_batch_size(self) -> Any:
        """Returns the batch size; builds the rows if it is not known."""
        known = self.__dict__.get("_known_batch_size")
        return materialise(self).batch_size if known is None else known

    def __getstate__(self) -> Any:
        return materialise(self).__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialise(self).__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(materialise(self), name, value)


class _UnmadeValues(_Unmade, NonTensorStack):
    """A NonTensorStack that is not built yet, shown under that name."""

    def tolist(self, **how: Any) -> Any:
        """Returns the values.

        If they are known, without building an object around each, which takes longer than reading it.
        """
        values = self.__dict__.get("_known_values")
        return materialise(self).tolist(**how) if values is None or how.get("as_linked_list") else list(values)


class _UnmadeStack(_Unmade):
    """A LazyStackedTensorDict that is not built yet, shown under that name."""


_PLAIN: dict[type, Any] = {_UnmadeValues: NonTensorStack, _UnmadeStack: LazyStackedTensorDict}


def defer_values(make: Make, batch_size: torch.Size | None, values: Sequence[Any] | None = None) -> Any:
    """Returns a NonTensorStack along dimension 0 that is built when it is first read.

    Args:
        make: Builds the stack.
        batch_size: Its batch size; None: known when it is built.
        values: The content of its rows, if each is a single value; None: known when it is built.
    """
    stack = _make_deferred(_UnmadeValues, make, batch_size, 0)
    stack.__dict__["_known_values"] = values
    return stack


def defer_stack(make: Make, batch_size: torch.Size | None, stack_dim: int) -> Any:
    """Returns a LazyStackedTensorDict that is built when it is first read.

    Args:
        make: Builds the stack.
        batch_size: Its batch size; None: known when it is built.
        stack_dim: Its dimension.
    """
    return _make_deferred(_UnmadeStack, make, batch_size, stack_dim)


def materialise(stack: Any) -> Any:
    """Builds a stack in place, as the same object of a plain class."""
    state = object.__getattribute__(stack, "__dict__")
    make = state.get("_make")
    if make is not None:
        whole = make()
        plain = _PLAIN.get(type(stack))
        if plain is not None:  # else another thread was faster
            become(stack, whole, plain)
            state.pop("_make", None)
            state.pop("_known_batch_size", None)
            state.pop("_known_values", None)
    return stack


def _make_deferred(kind: type, make: Make, batch_size: torch.Size | None, stack_dim: int) -> Any:
    stack: Any = object.__new__(kind)
    state = stack.__dict__
    state["_make"] = make
    state["_known_batch_size"] = batch_size
    state["stack_dim"] = stack_dim
    state.update(UNMADE_STATE)
    return stack


def _register(kind: type, plain: type) -> None:
    """Lets torch's pytrees traverse a stack that is not built yet."""
    known = pytree.SUPPORTED_NODES[plain]
    pytree.register_pytree_node(
        kind,
        lambda stack: known.flatten_fn(materialise(stack)),
        known.unflatten_fn,
        flatten_with_keys_fn=lambda stack: known.flatten_with_keys_fn(materialise(stack)),  # type: ignore[misc]
    )


_register(_UnmadeStack, LazyStackedTensorDict)
for _kind, _plain in _PLAIN.items():
    show_as(_kind, _plain)
