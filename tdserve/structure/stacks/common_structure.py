"""The structure that rows of a lazy stack have in common: their leaves, or a summary if the rows differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees.changes import rebatch
from tdserve.structure.trees.nodes import (
    PACKED,
    DimNames,
    Entry,
    Form,
    Node,
    Path,
    Ragged,
    TensorLeaf,
    ValueLeaf,
    has_nothing,
    is_marked,
)


class CapturedPart(NamedTuple):
    """A captured row or element, or several rows together.

    Attributes:
        root: Its structure.
        tensors, values: Its leaves by path.
        at: Its path, with which the paths of its leaves begin.
    """

    root: Node
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    at: Path = ()


class _Uneven(Exception):  # noqa: N818 - control flow, not an error
    """The rows differ in structure."""


def join_parts(
    parts: Sequence[CapturedPart], dim: int, *, path: Path, names: DimNames | None, joins_stacks: bool = False
) -> CapturedPart | None:
    """Joins rows into one node; None if they differ in more than the shapes of their tensors.

    Args:
        parts: At least one.
        dim: Position of the new dimension.
        path: Path of the node, with which the paths of the leaves begin.
        names: Names of all batch dimensions of the stack.
        joins_stacks: Whether rows that are, or have, lazy stacks are joined too, as if they were dense.
    """
    if parts[0].root.tensorclass is not None:
        return None  # a stack of instances differs from an instance around a stack
    result = _Stacking(parts, dim, None if names is None else names[dim], joins_stacks=joins_stacks)
    try:
        root = result.join_nodes([part.root for part in parts], path)
    except _Uneven:
        return None
    return CapturedPart(root._replace(stack_dim=dim), result.tensors, result.values, path)


class _Stacking:
    def __init__(self, parts: Sequence[CapturedPart], dim: int, name: str | None, *, joins_stacks: bool) -> None:
        self._parts = parts
        self._joins_stacks = joins_stacks
        self._dim = dim
        self._name = name
        self.tensors: dict[Path, torch.Tensor] = {}
        self.values: dict[Path, Any] = {}

    def join_nodes(self, nodes: list[Node], path: Path) -> Node:
        first = nodes[0]
        for node in nodes:
            is_same = (
                node.tensorclass == first.tensorclass
                and node.batch_size == first.batch_size
                and node.names == first.names
                and node.device == first.device
                and node.is_locked == first.is_locked
                and len(node.entries) == len(first.entries)
            )
            is_own = node.inner is not None or node.params is not None
            if not is_same or is_own or (node.stack_dim is not None and not self._joins_stacks):
                raise _Uneven
        rows = [dict(node.entries) for node in nodes]
        entries: list[tuple[str, Entry]] = []
        for key, _ in first.entries:
            column = [row.get(key) for row in rows]
            if any(type(entry) is not type(column[0]) for entry in column):
                raise _Uneven
            entries.append((key, self._join_entries(column, (*path, key), first.batch_size)))
        names = first.names or (None,) * len(first.batch_size)
        names = self._insert(names, self._name)
        return first._replace(
            batch_size=self._insert(first.batch_size, len(self._parts)),
            names=names if any(name is not None for name in names) else None,
            entries=tuple(entries),
        )

    def _join_entries(self, column: list[Any], path: Path, batch_size: tuple[int, ...]) -> Entry:
        if isinstance(column[0], Node):
            return self.join_nodes(column, path)
        if isinstance(column[0], TensorLeaf):
            return self._join_tensors(column, path, batch_size)
        return self._join_values(column, path)

    def _join_tensors(self, column: list[TensorLeaf], path: Path, batch_size: tuple[int, ...]) -> Entry:
        first = column[0]
        if any(leaf.dtype != first.dtype or len(leaf.shape) != len(first.shape) for leaf in column):
            raise _Uneven
        if any(map(is_marked, column)):
            raise _Uneven  # each is rebuilt by itself
        tensors = [part.tensors[path] for part in self._parts]
        depth = len(batch_size)
        is_even = all(leaf.shape == first.shape for leaf in column)
        # From a single row it is not known yet what may differ.
        if is_even and (len(column) > 1 or len(first.shape) == depth):
            joined = torch.stack([to_indexable(tensor) for tensor in tensors], self._dim)
            self.tensors[path] = joined.view(tensors[0].dtype)
            return TensorLeaf(first.dtype, self._insert(first.shape, len(column)))
        shape = tuple(
            size if not is_even and all(leaf.shape[depth + dim] == size for leaf in column) else -1
            for dim, size in enumerate(first.shape[depth:])
        )
        self.values[path] = self._list_pieces(tensors, batch_size, ())
        return ValueLeaf(self._insert(batch_size, len(column)), True, Ragged(Form.STACK, first.dtype, shape))

    def _list_pieces(self, tensors: list[torch.Tensor], batch_size: tuple[int, ...], index: tuple[int, ...]) -> Any:
        """Returns the elements of the whole batch as nested lists."""
        if len(index) == len(batch_size) + 1:
            rest = index[: self._dim] + index[self._dim + 1 :]
            return tensors[index[self._dim]][rest]
        size = self._insert(batch_size, len(tensors))[len(index)]
        return [self._list_pieces(tensors, batch_size, (*index, number)) for number in range(size)]

    def _join_values(self, column: list[ValueLeaf], path: Path) -> ValueLeaf:
        first = column[0]
        if first.ragged is not None or first.is_unbatched or any(leaf != first for leaf in column):
            raise _Uneven
        if first.batch_size and (self._dim or not first.per_row):
            raise _Uneven
        self.values[path] = [part.values[path] for part in self._parts]
        return ValueLeaf((len(column), *first.batch_size), True)

    def _insert(self, sizes: tuple[Any, ...], size: Any) -> tuple[Any, ...]:
        return (*sizes[: self._dim], size, *sizes[self._dim :])


def summarise(
    nodes: Sequence[Node], batch_size: tuple[int, ...], stack_dim: int | None = None
) -> tuple[tuple[int, ...], tuple[tuple[str, Entry], ...]]:
    """Summarises the elements of a packed node: their batch dimensions, and every key that one of them has.

    Args:
        nodes: The elements; or the rows of a single element that is a stack.
        batch_size: Batch size of the packed node.
        stack_dim: Stack dimension of that single element.
    """
    inner = _find_common_shape([_free(node) for node in nodes]) if nodes else ()
    entries: dict[str, Entry] = {}
    for node in nodes:
        for key, entry in node.entries:
            known = _find_known_entry(entry, batch_size)
            entries[key] = known if key not in entries else _choose_entry(entries[key], known, batch_size)
    if -1 in inner:

        def free(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(-1 if inner[dim : dim + 1] == (-1,) else size for dim, size in enumerate(shape))

        entries = {key: reshape_known(entry, free) for key, entry in entries.items()}
    if stack_dim is None:
        return inner, tuple(entries.items())
    return _widen_shape(inner, stack_dim), tuple((key, _with_rows(entry, stack_dim)) for key, entry in entries.items())


def wrap_element(node: Node) -> Node:
    """Wraps a packed node as the only element of another, so that whole ones may differ, as in rows of lazy stacks."""
    num_dims = len(node.batch_size)
    row = rebatch(node, num_dims, (), None)
    inner, entries = row.inner or (), row.entries
    for _ in range(num_dims):
        inner, entries = _widen_shape(inner, 0), tuple((key, _with_rows(entry, 0)) for key, entry in entries)
    return Node((), None, node.device, node.tensorclass, entries, inner=inner)


def reshape_known(entry: Entry, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Entry:
    """Returns an entry of a summary for elements of other shapes, all changed in the same way."""
    if isinstance(entry, Node):
        entries = tuple((key, reshape_known(child, change)) for key, child in entry.entries)
        return entry._replace(inner=change(entry.inner or ()), entries=entries)
    if isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.dtype:
        return entry._replace(ragged=entry.ragged._replace(shape=change(entry.ragged.shape)))
    return entry


def _with_rows(entry: Entry, dim: int) -> Entry:
    """Converts an entry of a summary of rows to one of their stack."""
    return reshape_known(entry, lambda shape: _widen_shape(shape, dim))


def _widen_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], -1, *shape[dim:])


def _free(node: Node) -> tuple[int, ...]:
    """Returns the batch size of an element, with -1 for the dimension along which it is stacked."""
    shown = node.shown_batch_size
    if node.stack_dim is None or node.inner is not None:
        return shown
    return (*shown[: node.stack_dim], -1, *shown[node.stack_dim + 1 :])


def _find_known_entry(entry: Entry, batch_size: tuple[int, ...]) -> Entry:
    if isinstance(entry, TensorLeaf):
        return ValueLeaf(batch_size, True, Ragged(Form.STACK, entry.dtype, entry.shape))
    if isinstance(entry, ValueLeaf):
        ragged = entry.ragged
        if ragged is not None and ragged.form is not Form.PACKED:
            ragged = Ragged(Form.STACK, ragged.dtype, entry.batch_size + ragged.shape)
        return ValueLeaf(batch_size, True, ragged)
    inner, entries = summarise([entry], batch_size)
    return Node(batch_size, None, None, entry.tensorclass, entries, inner=inner)


def _choose_entry(one: Entry, other: Entry, batch_size: tuple[int, ...]) -> Entry:
    if isinstance(one, Node) and isinstance(other, Node) and one.tensorclass == other.tensorclass:
        entries = dict(one.entries)
        for key, entry in other.entries:
            entries[key] = entry if key not in entries else _choose_entry(entries[key], entry, batch_size)
        return one._replace(
            entries=tuple(entries.items()), inner=_find_common_shape([one.inner or (), other.inner or ()])
        )
    if isinstance(one, ValueLeaf) and isinstance(other, ValueLeaf):
        if one == other or has_nothing(other):
            return one
        if has_nothing(one):
            return other
        mine, theirs = one.ragged, other.ragged
        is_alike = mine is not None and theirs is not None and mine.dtype == theirs.dtype
        if mine is not None and theirs is not None and is_alike and len(mine.shape) == len(theirs.shape):
            return one._replace(ragged=mine._replace(shape=_find_common_shape([mine.shape, theirs.shape])))
    return ValueLeaf(batch_size, True, PACKED)


def _find_common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the common shape, with -1 where shapes differ."""
    return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=False))
