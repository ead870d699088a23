"""Non-tensor entries whose value is stored elsewhere: each access reads it again, in-place updates write it.

This module handles what tensordict does with such entries. An operation that shares a tensor's memory (a shallow copy,
an index of ints and slices, ``unbind``) returns live entries again; one that copies returns plain entries of the
current value.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import NonTensorData, NonTensorStack, is_tensor_collection
from tensordict.utils import LinkedList

from tdserve.base.errors import TDServeError, WrongStateError
from tdserve.structure.tensordict_private import LiveDataHooks, LiveStackHooks, new_tensordict, set_content

_SHOWN_CHARS = 50
"""Characters of a value in a repr; tensordict shortens its stacks in the same way."""


class ValueSource(Protocol):
    """The storage of a live entry's value. It must be picklable if the entry is to be."""

    def read(self) -> Any:
        """Returns the current value, as a new NonTensorData or NonTensorStack."""

    def write(self, value: Any) -> None:
        """Replaces the value: a NonTensorData is one value for all rows, a NonTensorStack or list has one for each."""

    def select(self, index: Any) -> ValueSource:
        """Returns a part of its rows. Raises IndexError for an int beyond them."""


class LiveEntry:
    """The part that both kinds of live entries share.

    Its writes work in a locked tensordict too, as those of tensordict's own shared entries do; ``update`` needs
    ``inplace=True`` there.
    """

    _value_source: ValueSource

    def to_plain(self) -> Any:
        """Returns a plain entry of the current value."""
        return self._value_source.read()

    def update(self, value: Any = None, clone: bool = False, inplace: bool = False, **_: Any) -> Any:
        """Writes the value."""
        return self if value is None else self.change(value, inplace=inplace)

    def update_(self, value: Any = None, clone: bool = False, **_: Any) -> Any:
        """Writes the value."""
        return self.update(value, inplace=True)

    def copy_(self, value: Any, non_blocking: bool = False) -> Any:
        """Writes the value."""
        return self.update(value, inplace=True)

    def update_at_(self, value: Any, idx: Any, clone: bool = False, **_: Any) -> Any:
        """Writes the values of some rows."""
        self[idx] = value
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self._value_source.select(index).write(value.tolist() if isinstance(value, LinkedList) else value)

    def clone(self, recurse: bool = True, **_: Any) -> Any:
        """Returns the current value; with ``recurse=False`` another entry of the same live value."""
        return self.to_plain() if recurse else self.copy()

    def copy(self) -> Any:
        """Returns another entry of the same live value."""
        return make_live_entry(*self._parts)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.to_plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_live_entry, self._parts

    def share_memory_(self) -> Any:
        """Returns itself, since it is shared."""
        return self

    def change(self, value: Any, *, inplace: bool) -> Any:
        """Writes the value.

        Raises:
            WrongStateError: The tensordict around it is locked, and ``inplace`` is false.
        """
        if not inplace and self.is_locked:  # type: ignore[attr-defined]
            raise WrongStateError(state="the tensordict is locked", event="update(); pass inplace=True")
        self._put(value)
        return self

    @property
    def _parts(self) -> tuple[Any, ...]:
        """Returns the arguments with which ``make_live_entry`` makes another one."""
        raise NotImplementedError

    def _put(self, value: Any) -> None:
        self._value_source.write(value)

    def format_value(self) -> str:
        """Returns the value for a repr."""
        try:
            entry = self.to_plain()
        except TDServeError as error:
            return f"<{error}>"
        shown = repr(entry.data if isinstance(entry, NonTensorData) else entry.tolist())
        return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."


class _AsWritten(type(NonTensorData)):  # type: ignore[misc]
    """A metaclass that keeps a class as its body defines it; tensordict's own would replace its operators."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        return ABCMeta.__new__(mcs, name, bases, namespace)


class LiveNonTensorData(LiveDataHooks, LiveEntry, NonTensorData, metaclass=_AsWritten):  # type: ignore[misc]
    """A NonTensorData whose ``data`` is read at every access; made by ``make_live_entry``.

    Assignments to ``data``, ``update``, ``update_``, ``copy_``, and ``set_`` of a tensordict that holds it write the
    value. Any access raises what its source raises, such as StoreNotFoundError.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a plain entry: tensordict calls the class of an entry to make changed copies of it."""
        return NonTensorData(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def __init__(self) -> None:
        """Does nothing, since ``make_live_entry`` makes the object."""

    @property  # type: ignore[misc]
    def data(self) -> Any:
        """The current value.

        Raises:
            WrongStateError: The rows have different values by now; ``tolist()`` returns them.
        """
        entry = self.to_plain()
        if isinstance(entry, NonTensorData):
            return entry.data
        rows = _flatten(entry.tolist(), len(entry.batch_size))
        if not rows or any(type(row) is not type(rows[0]) or row != rows[0] for row in rows):
            raise WrongStateError(state="the rows of this entry have different values", event="data; use tolist()")
        return rows[0]

    @data.setter
    def data(self, value: Any) -> None:
        self._put(value)

    def __getattr__(self, name: str) -> Any:
        if name in self.never_inside:
            raise AttributeError(name)
        return getattr(self.frame, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            self._put(value)
        else:
            setattr(self.frame, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.format_value()}, batch_size={self.batch_size}, device={self.device})"

    def __getitem__(self, index: Any) -> Any:
        if not is_view(index):
            return self.to_plain()[index]
        td = self.frame[index]
        return _make_single(
            self._value_source.select(index), td.batch_size, td.device, td.names if any(td.names) else None
        )

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self._value_source, self.batch_size, self.device, self.own_names, False

    def empty(self, recurse: bool = False, **kwargs: Any) -> Any:
        """Returns the current value, with another batch size, device or names."""
        return self.to_plain().empty(recurse, **kwargs)

    def tolist(self, **options: Any) -> Any:
        """Returns the current values, one per row; without rows the value."""
        return self.to_plain().tolist(**options)

    def maybe_to_stack(self) -> Any:
        """Returns a live stack of the same rows."""
        source, batch_size, device, names, _ = self._parts
        return make_live_entry(source, batch_size, device, names, True)

    def _put(self, value: Any) -> None:
        self._value_source.write(
            value if is_tensor_collection(value) else NonTensorData(value, batch_size=self.batch_size)
        )

    def unbind(self, dim: int) -> tuple[Any, ...]:
        """Returns the rows along a dimension, as live entries."""
        dim %= len(self.batch_size)
        return tuple(self[(slice(None),) * dim + (row,)] for row in range(self.batch_size[dim]))


class LiveNonTensorStack(LiveStackHooks, LiveEntry, NonTensorStack):  # type: ignore[misc, override]
    """A NonTensorStack whose values are read at every access, all of them together; made by ``make_live_entry``.

    ``update``, ``update_``, ``copy_``, ``stack[i] = value``, and ``set_`` and ``set_at_`` of a tensordict that holds it
    write the values, all rows of one call together. Its rows are live entries themselves.
    """

    _rows: list[Any] | None
    _live_device: torch.device | None
    own_names: list[str | None] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a plain stack: tensordict calls the class of a stack to make changed copies of it."""
        return NonTensorStack(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def __init__(self) -> None:
        """Does nothing, since ``make_live_entry`` makes the object."""

    @property
    def tensordicts(self) -> list[Any]:  # type: ignore[override]
        """The rows, as live entries; made when they are first accessed."""
        if self._rows is None:
            size, *below = self.batch_size
            names = None if self.own_names is None else self.own_names[1:]
            sources = (self._value_source.select(row) for row in range(size))
            self._rows = [make_live_entry(source, below, self._live_device, names, bool(below)) for source in sources]
        return self._rows

    @property  # type: ignore[misc]
    def device(self) -> torch.device | None:
        """Device of the tensordict around it."""
        return self._live_device

    @property  # type: ignore[misc]
    def names(self) -> list[str | None]:
        """Names of the batch dimensions."""
        return list(self.own_names or [None] * len(self.batch_size))

    @property  # type: ignore[misc]
    def data(self) -> Any:
        """The value of all rows. Raises AttributeError if they differ, as tensordict's own does."""
        return self.to_plain().data

    def to_plain(self) -> Any:
        """Returns a plain NonTensorStack of the current values."""
        return super().to_plain().maybe_to_stack()

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> Any:
        """Returns the current values; assigning to an item of a linked list writes it."""
        values = self.to_plain().tolist(**options)
        return LinkedList(values, td=self) if as_linked_list else values

    def __getitem__(self, index: Any) -> Any:
        if not is_view(index):
            return self.to_plain()[index]
        batch_size = torch.empty(self.batch_size, device="meta")[index].shape
        return make_live_entry(self._value_source.select(index), batch_size, self._live_device, None, bool(batch_size))

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self._value_source, self.batch_size, self._live_device, self.own_names, True

    def maybe_to_stack(self) -> Any:
        """Returns itself."""
        return self


def make_live_entry(
    source: ValueSource,
    batch_size: Sequence[int],
    device: torch.device | None = None,
    names: Sequence[str | None] | None = None,
    is_stack: bool = False,
) -> Any:
    """Makes a live entry over a source.

    Args:
        source: Storage of the value.
        batch_size: Batch size of the source's rows.
        device: Device of the tensordict that it goes into.
        names: Names of the batch dimensions; None when none has one.
        is_stack: Whether it is a LiveNonTensorStack, one value per row; else, and without rows, a LiveNonTensorData.
    """
    if not is_stack or not len(batch_size):
        return _make_single(source, batch_size, device, names)
    stack = LiveNonTensorStack()
    stack._value_source = source
    stack._live_device = device
    stack.own_names = None if names is None else list(names)
    stack._rows = None
    stack.begin(torch.Size(batch_size))
    return stack


def _make_single(
    source: ValueSource, batch_size: Sequence[int], device: torch.device | None, names: Sequence[str | None] | None
) -> LiveNonTensorData:
    leaf = LiveNonTensorData()
    own_names: Any = None if names is None else list(names)
    td = new_tensordict({}, batch_size=torch.Size(batch_size), device=device, names=own_names)
    set_content(leaf, td)
    object.__setattr__(leaf, "_value_source", source)
    return leaf


def is_view(index: Any) -> bool:
    """Returns whether the result of an index shares memory with the indexed object."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(part) is int or part is Ellipsis or _is_forward(part) for part in parts)


def _is_forward(part: Any) -> bool:
    return isinstance(part, slice) and (part.step is None or part.step > 0)


def _flatten(values: Any, num_dims: int) -> list[Any]:
    return values if num_dims == 1 else [value for row in values for value in _flatten(row, num_dims - 1)]
