"""A quick view of a large tensordict or module: its tensors in one list, compared by one property after the other.

Thousands of small tuples at once would trigger the garbage collector, which takes longer than the comparison itself
(measured), and longer the more objects the process has. So nothing here makes an object per tensor that outlives its
comparison.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams

from tdserve.structure.tensordict_private import entries_of, names_of, params_content
from tdserve.structure.tensors.plain_tensors import is_in_memory
from tdserve.structure.torch_private import buffers_of, modules_of, parameters_of

MIN_LEAVES = 64
"""Capturing fewer leaves takes a tenth of a millisecond."""

_END = (None,)

_PLAIN_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))

Column = Callable[[torch.Tensor], Any]

get_dtype: Column = attrgetter("dtype")
get_shape: Column = attrgetter("shape")
needs_grad: Column = attrgetter("requires_grad")


class TensorView(ABC):
    """A quick view of a tensordict or module, to compare it with.

    Attributes:
        purpose: What the capture is for; part of the key under which it is kept.
        kind: Class of the whole.
        leaves: Its tensors, in order.
    """

    def __init__(self, purpose: object, kind: type, leaves: list[torch.Tensor]) -> None:
        self.purpose = purpose
        self.kind = kind
        self.leaves = leaves

    @property
    def identity_hash(self) -> int:
        """Equal for the same tensors, and sometimes for others."""
        return hash((id(self.leaves[0]), len(self.leaves), self.purpose))

    @property
    def is_plain(self) -> bool:
        """Whether the own memory of every tensor is sent.

        Of a negative or conjugate view a capture has a copy, and one without memory is refused.
        """
        leaves = self.leaves
        return (
            all(map(is_, map(attrgetter("layout"), leaves), repeat(torch.strided)))
            and not any(map(attrgetter("is_nested"), leaves))
            and not any(map(attrgetter("is_meta"), leaves))
            and not any(map(torch.Tensor.is_complex, leaves))
            and not any(map(torch.Tensor.is_neg, leaves))
            and all(map(is_in_memory, leaves))
        )

    @property
    def is_dense(self) -> bool:
        """Whether every tensor is contiguous."""
        return all(map(torch.Tensor.is_contiguous, self.leaves))

    @property
    @abstractmethod
    def first_key(self) -> str:
        """The first key of the root."""

    @abstractmethod
    def list_nodes(self) -> list[Any]:
        """Returns all that distinguishes its structure, besides the tensors themselves."""

    @abstractmethod
    def has_nodes(self, nodes: list[Any]) -> bool:
        """Returns whether ``list_nodes`` would return these."""

    def has_column(self, column: Column, values: Sequence[Any]) -> bool:
        """Returns whether a property of the tensors has these values."""
        return len(values) == len(self.leaves) and all(map(eq, values, map(column, self.leaves)))

    def list_plain_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors as a capture has them: parameters, and what requires grad, detached."""
        leaves = self.leaves
        if all(map(is_, map(type, leaves), repeat(torch.Tensor))) and not any(map(needs_grad, leaves)):
            return leaves
        return [leaf.detach() for leaf in leaves]


class _TensorDictView(TensorView):
    def __init__(self, purpose: object, kind: type, root: TensorDict, leaves: list[torch.Tensor]) -> None:
        super().__init__(purpose, kind, leaves)
        self._root = root

    @property
    def first_key(self) -> str:
        return next(iter(entries_of(self._root)))

    def list_nodes(self) -> list[Any]:
        """Returns keys, batch size, names and device of every node."""
        return list(_iter_nodes(self._root))

    def has_nodes(self, nodes: list[Any]) -> bool:
        return all(map(eq, chain(nodes, _END), chain(_iter_nodes(self._root), _END)))


class _ModuleView(TensorView):
    """The view of a module, whose tensors are those of ``TensorDict.from_module``, in its order.

    That call makes three objects of each module inside.
    """

    def __init__(self, purpose: object, module: torch.nn.Module) -> None:
        super().__init__(purpose, type(module), [])
        self._names: list[object] = []
        self._walk(module)

    def _walk(self, module: torch.nn.Module) -> None:
        for entries in (parameters_of(module), buffers_of(module)):
            for name, item in entries.items():
                if item is not None:
                    self._names.append(name)
                    self.leaves.append(item)
        for name, child in modules_of(module).items():
            if child is not None:
                self._walk_child(name, child)

    def _walk_child(self, name: str, child: torch.nn.Module) -> None:
        if isinstance(child, TensorDictBase):
            raise TypeError(name)
        num_leaves, num_names = len(self.leaves), len(self._names)
        self._names += _BEGIN_MODULE, name
        self._walk(child)
        if len(self.leaves) == num_leaves:
            del self._names[num_names:]
        else:
            self._names.append(_END_MODULE)

    @property
    def first_key(self) -> str:
        return str(self._names[0])

    def list_nodes(self) -> list[Any]:
        """Returns the names of tensors and of modules, and marks of where a module begins and ends."""
        return self._names

    def has_nodes(self, nodes: list[Any]) -> bool:
        return self._names == nodes


_BEGIN_MODULE, _END_MODULE = 1, 0
"""Marks between names: the next name is that of a module; the tensors of a module end here."""


def view_module(module: torch.nn.Module, purpose: object) -> TensorView | None:
    """Returns the view of a module of many plain tensors; None for any other."""
    try:
        view = _ModuleView(purpose, module)
    except TypeError:  # it holds a tensordict, which has an order of its own
        return None
    if len(view.leaves) < MIN_LEAVES or not _PLAIN_CLASSES.issuperset(map(type, view.leaves)):
        return None
    return view


def view_tensordict(td: Any, purpose: object) -> TensorView | None:
    """Returns the view of a large tensordict that consists of plain tensordicts and tensors; None for any other."""
    root = params_content(td) if type(td) is TensorDictParams else td
    if type(root) is not TensorDict:
        return None
    leaves: list[torch.Tensor] = []
    if _count_entries(root) < MIN_LEAVES or not _collect(root, leaves) or len(leaves) < MIN_LEAVES:
        return None
    return _TensorDictView(purpose, type(td), root, leaves)


def _count_entries(td: TensorDict) -> int:
    """Counts the leaves of a tensordict without reading them."""
    items = entries_of(td).values()
    return len(items) + sum(_count_entries(item) - 1 for item in items if type(item) is TensorDict)


def _collect(td: TensorDict, leaves: list[torch.Tensor]) -> bool:
    """Collects leaves; False if there is anything but plain tensordicts and tensors."""
    for item in entries_of(td).values():
        kind = type(item)
        if kind in _PLAIN_CLASSES:
            leaves.append(item)
        elif kind is not TensorDict or not _collect(item, leaves):
            return False
    return True


def _iter_nodes(td: TensorDict) -> Iterator[tuple[Any, ...]]:
    """Yields keys, batch size, names and device of every node."""
    names = names_of(td)
    yield tuple(entries_of(td)), td.batch_size, None if names is None else tuple(names), td.device
    for item in entries_of(td).values():
        if type(item) is TensorDict:
            yield from _iter_nodes(item)
