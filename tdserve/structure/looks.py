"""A quick view of a large tensordict: its tensors in one list, compared by one property after the other.

Thousands of small tuples at once would trigger the garbage collector, which takes longer than the comparison itself
(measured), and longer the more objects the process has. So nothing here makes an object per tensor that outlives its
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams

from tdserve.structure.tensordict_private import entries_of, names_of, params_content

MIN_LEAVES = 64
"""Capturing fewer leaves takes a tenth of a millisecond."""

_END = (None,)

Column = Callable[[torch.Tensor], Any]

get_dtype: Column = attrgetter("dtype")
get_shape: Column = attrgetter("shape")
needs_grad: Column = attrgetter("requires_grad")


class Looks:
    """A quick view of a tensordict, to compare it with.

    Attributes:
        purpose: Purpose of the result.
        kind: Class of the whole.
        root: The tensordict itself.
        leaves: Its tensors, in order.
    """

    def __init__(self, purpose: object, kind: type, root: TensorDict, leaves: list[torch.Tensor]) -> None:
        self.purpose = purpose
        self.kind = kind
        self.root = root
        self.leaves = leaves

    @property
    def number(self) -> int:
        """Hash: equal for the same tensors, and sometimes for others."""
        return hash((id(self.leaves[0]), len(self.leaves), self.purpose))

    @property
    def is_plain(self) -> bool:
        """Whether the own memory of every tensor is sent: of a negative or conjugate view a capture has a copy."""
        leaves = self.leaves
        return (
            all(map(is_, map(attrgetter("layout"), leaves), repeat(torch.strided)))
            and not any(map(attrgetter("is_nested"), leaves))
            and not any(map(attrgetter("is_meta"), leaves))
            and not any(map(torch.Tensor.is_complex, leaves))
            and not any(map(torch.Tensor.is_neg, leaves))
        )

    @property
    def is_dense(self) -> bool:
        """Whether every tensor is contiguous."""
        return all(map(torch.Tensor.is_contiguous, self.leaves))

    def list_nodes(self) -> list[Any]:
        """Returns keys, batch size, names and device of every node."""
        return list(_iter_nodes(self.root))

    def has_nodes(self, nodes: Iterable[Any]) -> bool:
        """Returns whether ``list_nodes`` would return these."""
        return all(map(eq, chain(nodes, _END), chain(_iter_nodes(self.root), _END)))

    def has_column(self, column: Column, values: Sequence[Any]) -> bool:
        """Returns whether a property of the tensors has these values."""
        return len(values) == len(self.leaves) and all(map(eq, values, map(column, self.leaves)))

    def list_plain_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors as a capture has them: parameters, and what requires grad, detached."""
        leaves = self.leaves
        if all(map(is_, map(type, leaves), repeat(torch.Tensor))) and not any(map(needs_grad, leaves)):
            return leaves
        return [leaf.detach() for leaf in leaves]


def look(td: Any, purpose: object) -> Looks | None:
    """Returns the view of a large tensordict that consists of plain tensordicts and tensors; None for any other."""
    root = params_content(td) if type(td) is TensorDictParams else td
    if type(root) is not TensorDict:
        return None
    leaves: list[torch.Tensor] = []
    if _num_entries(root) < MIN_LEAVES or not _collect(root, leaves) or len(leaves) < MIN_LEAVES:
        return None
    return Looks(purpose, type(td), root, leaves)


def _num_entries(td: TensorDict) -> int:
    """Counts the leaves of a tensordict without reading them."""
    items = entries_of(td).values()
    return len(items) + sum(_num_entries(item) - 1 for item in items if type(item) is TensorDict)


def _collect(td: TensorDict, leaves: list[torch.Tensor]) -> bool:
    """Collects leaves; False if there is anything but plain tensordicts and tensors."""
    for item in entries_of(td).values():
        kind = type(item)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
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
