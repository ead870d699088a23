"""Values and rows that are put together when somebody looks at them.

What a read brings of non-tensor values and lazy stacks stays bytes until then. The tensordicts below are instances of
tensordict's own classes, and become plain ones at the first look; nothing but speed tells them apart.
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
"""Fewer are put together at once: that takes a few microseconds."""


class Deferred(Sequence[Any]):
    """A list that is made of bytes at the first look at an element. Threads: safe, at worst it is made twice.

    Args:
        blobs: Content of the elements.
        decode: Makes them all at once.
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
        """The elements."""
        if self._items is None:
            self._items = self._decode(self._blobs)
        return self._items


class _Unmade(UnmadeHooks):
    """A stack whose rows are not there yet; it has ``_make`` in its ``__dict__``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # tensordict makes more of a stack by ``type(stack)(...)``
        return _PLAIN[cls](*args, **kwargs)

    @property
    def tensordicts(self) -> Any:
        """The rows."""
        return materialise(self).tensordicts

    def find_batch_size(self) -> Any:
        """The batch size; puts the rows together where it is not known."""
        known = self.__dict__.get("_known_batch_size")
        return materialise(self).batch_size if known is None else known

    def __getstate__(self) -> Any:
        return materialise(self).__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialise(self).__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(materialise(self), name, value)


class _UnmadeValues(_Unmade, NonTensorStack):  # type: ignore[override]  # the properties stand for attributes
    """Shown by the name of what it becomes."""

    def tolist(self, **how: Any) -> Any:
        """The values; where they are known, without an object around each, which takes longer than to read it."""
        values = self.__dict__.get("_known_values")
        return materialise(self).tolist(**how) if values is None or how.get("as_linked_list") else list(values)


class _UnmadeStack(_Unmade, LazyStackedTensorDict):  # type: ignore[override]  # as above
    """Shown by the name of what it becomes."""


_PLAIN: dict[type, Any] = {_UnmadeValues: NonTensorStack, _UnmadeStack: LazyStackedTensorDict}


def later_values(make: Make, batch_size: torch.Size | None, values: Sequence[Any] | None = None) -> Any:
    """A NonTensorStack along dimension 0 that ``make`` makes at the first look.

    Args:
        make: Gives the stack.
        batch_size: Its batch size, or None: that is seen when it is made.
        values: What is in its rows, where each is a single value; None: that is seen when it is made.
    """
    stack = _unmade(_UnmadeValues, make, batch_size, 0)
    stack.__dict__["_known_values"] = values
    return stack


def later_stack(make: Make, batch_size: torch.Size | None, stack_dim: int) -> Any:
    """A LazyStackedTensorDict that ``make`` makes at the first look.

    Args:
        make: Gives the stack.
        batch_size: Its batch size, or None: that is seen when it is made.
        stack_dim: Its dimension.
    """
    return _unmade(_UnmadeStack, make, batch_size, stack_dim)


def materialise(stack: Any) -> Any:
    """The same object, as a plain one."""
    state = object.__getattribute__(stack, "__dict__")
    make = state.get("_make")
    if make is not None:
        whole = make()
        plain = _PLAIN.get(type(stack))
        if plain is not None:  # else another thread was quicker
            become(stack, whole, plain)
            state.pop("_make", None)
            state.pop("_known_batch_size", None)
            state.pop("_known_values", None)
    return stack


def _unmade(kind: type, make: Make, batch_size: torch.Size | None, stack_dim: int) -> Any:
    stack: Any = object.__new__(kind)
    state = stack.__dict__
    state["_make"] = make
    state["_known_batch_size"] = batch_size
    state["stack_dim"] = stack_dim
    state.update(UNMADE_STATE)
    return stack


def _register(kind: type, plain: type) -> None:
    """Lets torch's trees see through a stack that is not made yet."""
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
