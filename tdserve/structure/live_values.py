"""Non-tensor entries whose value lies elsewhere: read anew at every look, written through by in-place updates.

Owns the knowledge of what tensordict does with the entries it holds. An operation that shares a tensor's memory (a
shallow copy, an index of ints and slices, ``unbind``) gives live entries again; one that copies gives plain ones of
what the value is now.
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
"""Of a value in a repr, as tensordict cuts its stacks."""


class ValueSource(Protocol):
    """Where the value of a live entry lies. It must pickle if the entry is to."""

    def read(self) -> Any:
        """What it is now, as a NonTensorData or NonTensorStack that nobody else has."""

    def write(self, value: Any) -> None:
        """Replaces it: a NonTensorData is one value for all rows, a NonTensorStack or list has one for each."""

    def at(self, index: Any) -> ValueSource:
        """A part of its rows. Raises IndexError for an int beyond them."""


class LiveEntry:
    """What both kinds of live entries have. What writes does so in a locked tensordict too, as tensordict's own shared
    entries do; ``update`` must say ``inplace=True`` there."""

    _value_source: ValueSource

    def now(self) -> Any:
        """A plain entry of what the value is now."""
        return self._value_source.read()

    def update(self, value: Any = None, clone: bool = False, inplace: bool = False, **_: Any) -> Any:
        """Writes through."""
        return self if value is None else self.change(value, inplace=inplace)

    def update_(self, value: Any = None, clone: bool = False, **_: Any) -> Any:
        """Writes through."""
        return self.update(value, inplace=True)

    def copy_(self, value: Any, non_blocking: bool = False) -> Any:
        """Writes through."""
        return self.update(value, inplace=True)

    def update_at_(self, value: Any, idx: Any, clone: bool = False, **_: Any) -> Any:
        """Writes some rows through."""
        self[idx] = value
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self._value_source.at(index).write(value.tolist() if isinstance(value, LinkedList) else value)

    def clone(self, recurse: bool = True, **_: Any) -> Any:
        """What it is now; with ``recurse=False`` another entry of the same live value."""
        return self.now() if recurse else self.copy()

    def copy(self) -> Any:
        """Another entry of the same live value."""
        return live_entry(*self._parts)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.now()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return live_entry, self._parts

    def share_memory_(self) -> Any:
        """Itself: it is shared."""
        return self

    def change(self, value: Any, *, inplace: bool) -> Any:
        """Writes through.

        Raises:
            WrongStateError: The tensordict around it is locked, and it is not said that this is in place.
        """
        if not inplace and self.is_locked:  # type: ignore[attr-defined]
            raise WrongStateError(state="the tensordict is locked", event="update(); say inplace=True")
        self._put(value)
        return self

    @property
    def _parts(self) -> tuple[Any, ...]:
        """What ``live_entry`` makes another one of."""
        raise NotImplementedError

    def _put(self, value: Any) -> None:
        self._value_source.write(value)

    def format_value(self) -> str:
        """The value for a repr."""
        try:
            entry = self.now()
        except TDServeError as error:
            return f"<{error}>"
        shown = repr(entry.data if isinstance(entry, NonTensorData) else entry.tolist())
        return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."


class _AsWritten(type(NonTensorData)):  # type: ignore[misc]
    """Makes a class of what its body says; tensordict's own metaclass would put its operators over those of the
    body."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        return ABCMeta.__new__(mcs, name, bases, namespace)


class LiveNonTensorData(LiveDataHooks, LiveEntry, NonTensorData, metaclass=_AsWritten):  # type: ignore[misc]
    """A NonTensorData whose ``data`` is read at every access; made by ``live_entry``.

    Assigning to ``data``, ``update``, ``update_``, ``copy_``, and ``set_`` of a tensordict that holds it write through.
    Any access raises what its source raises, such as StoreNotFoundError.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """tensordict makes changed copies of an entry by calling its class: they are plain."""
        return NonTensorData(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def __init__(self) -> None:
        """Nothing: ``live_entry`` makes it."""

    @property  # type: ignore[misc]
    def data(self) -> Any:
        """The value, as of now.

        Raises:
            WrongStateError: The rows have been given different values since; ``tolist()`` has them.
        """
        entry = self.now()
        if isinstance(entry, NonTensorData):
            return entry.data
        rows = _flat(entry.tolist(), len(entry.batch_size))
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
            return self.now()[index]
        td = self.frame[index]
        return _single(self._value_source.at(index), td.batch_size, td.device, td.names if any(td.names) else None)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self._value_source, self.batch_size, self.device, self.own_names, False

    def empty(self, recurse: bool = False, **kwargs: Any) -> Any:
        """What it is now, with another batch size, device or names."""
        return self.now().empty(recurse, **kwargs)

    def tolist(self, **options: Any) -> Any:
        """One value per row, as of now; without rows the value."""
        return self.now().tolist(**options)

    def maybe_to_stack(self) -> Any:
        """A live stack of the same rows."""
        source, batch_size, device, names, _ = self._parts
        return live_entry(source, batch_size, device, names, True)

    def _put(self, value: Any) -> None:
        self._value_source.write(
            value if is_tensor_collection(value) else NonTensorData(value, batch_size=self.batch_size)
        )

    def unbind(self, dim: int) -> tuple[Any, ...]:
        """The rows along a dimension, as live entries."""
        dim %= len(self.batch_size)
        return tuple(self[(slice(None),) * dim + (row,)] for row in range(self.batch_size[dim]))


class LiveNonTensorStack(LiveStackHooks, LiveEntry, NonTensorStack):  # type: ignore[misc, override]
    """A NonTensorStack whose values are read at every access, all of them together; made by ``live_entry``.

    ``update``, ``update_``, ``copy_``, ``stack[i] = value``, and ``set_`` and ``set_at_`` of a tensordict that holds it
    write through, all rows of one call together. Its rows are live entries themselves.
    """

    _rows: list[Any] | None
    _live_device: torch.device | None
    own_names: list[str | None] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """tensordict makes changed copies of a stack by calling its class: they are plain."""
        return NonTensorStack(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def __init__(self) -> None:
        """Nothing: ``live_entry`` makes it."""

    @property
    def tensordicts(self) -> list[Any]:  # type: ignore[override]
        """The rows, as live entries; made when they are first asked for."""
        if self._rows is None:
            size, *below = self.batch_size
            names = None if self.own_names is None else self.own_names[1:]
            sources = (self._value_source.at(row) for row in range(size))
            self._rows = [live_entry(source, below, self._live_device, names, bool(below)) for source in sources]
        return self._rows

    @property  # type: ignore[misc]
    def device(self) -> torch.device | None:
        """Of the tensordict around it."""
        return self._live_device

    @property  # type: ignore[misc]
    def names(self) -> list[str | None]:
        """Of the batch dimensions."""
        return list(self.own_names or [None] * len(self.batch_size))

    @property  # type: ignore[misc]
    def data(self) -> Any:
        """The value that all rows have. Raises AttributeError where they differ, as tensordict's own does."""
        return self.now().data

    def now(self) -> Any:
        """A plain NonTensorStack of what the values are now."""
        return super().now().maybe_to_stack()

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> Any:
        """The values, as of now; assigning to an item of a linked list writes through."""
        values = self.now().tolist(**options)
        return LinkedList(values, td=self) if as_linked_list else values

    def __getitem__(self, index: Any) -> Any:
        if not is_view(index):
            return self.now()[index]
        batch_size = torch.empty(self.batch_size, device="meta")[index].shape
        return live_entry(self._value_source.at(index), batch_size, self._live_device, None, bool(batch_size))

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self._value_source, self.batch_size, self._live_device, self.own_names, True

    def maybe_to_stack(self) -> Any:
        """Itself."""
        return self


def live_entry(
    source: ValueSource,
    batch_size: Sequence[int],
    device: torch.device | None = None,
    names: Sequence[str | None] | None = None,
    is_stack: bool = False,
) -> Any:
    """A live entry over a source.

    Args:
        source: Where the value lies.
        batch_size: Of the source's rows.
        device: Of the tensordict that it goes into.
        names: Of the batch dimensions; None when none has one.
        is_stack: Whether it is a LiveNonTensorStack, one value per row; else, and without rows, a LiveNonTensorData.
    """
    if not is_stack or not len(batch_size):
        return _single(source, batch_size, device, names)
    stack = LiveNonTensorStack()
    stack._value_source = source
    stack._live_device = device
    stack.own_names = None if names is None else list(names)
    stack._rows = None
    stack.begin(torch.Size(batch_size))
    return stack


def _single(
    source: ValueSource, batch_size: Sequence[int], device: torch.device | None, names: Sequence[str | None] | None
) -> LiveNonTensorData:
    leaf = LiveNonTensorData()
    own_names: Any = None if names is None else list(names)
    td = new_tensordict({}, batch_size=torch.Size(batch_size), device=device, names=own_names)
    set_content(leaf, td)
    object.__setattr__(leaf, "_value_source", source)
    return leaf


def is_view(index: Any) -> bool:
    """Whether what an index selects shares memory with what it is taken of."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(part) is int or part is Ellipsis or _is_forward(part) for part in parts)


def _is_forward(part: Any) -> bool:
    return isinstance(part, slice) and (part.step is None or part.step > 0)


def _flat(values: Any, num_dims: int) -> list[Any]:
    return values if num_dims == 1 else [value for row in values for value in _flat(row, num_dims - 1)]
