"""Ragged entries that a user declares in a row: tensors that may differ in shape, nodes whose rows may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.structure.captures.captured import Captured
from tdserve.structure.stacks.common_structure import reshape_known, summarise, wrap_element
from tdserve.structure.stacks.elements import flatten_elements, make_nested_leaf
from tdserve.structure.tensordicts.entries import change_tensors
from tdserve.structure.tensors.file_tensors import read_into_memory
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.torch_private import unset_fake_temporarily
from tdserve.structure.trees.changes import drop_batch_dim, replace_entries
from tdserve.structure.trees.nodes import Entry, Form, Node, Path, Ragged, TensorLeaf, ValueLeaf, find_packed_stack_dim
from tdserve.structure.trees.tree import Spec, has_stack, show

Declared = Mapping[Any, Sequence[int] | int] | Iterable[Any] | None
"""Keys, or keys with the dimensions of the row's tensor that may differ."""


def declare_ragged(spec: Spec, values: Mapping[Path, Any], ragged: Declared, *, store: str) -> Spec:
    """Returns the structure of a row in which some entries are ragged.

    Args:
        spec: Structure of one row, as it was captured.
        values: Its values by path. A nested tensor with one component, outside of any batch dimension, is the tensor of
            one row and declares its ragged dimension.
        ragged: Keys of tensors and nodes; () is the row itself. If no dimension is named, dimension 0 of a tensor may
            differ, and the first batch dimension of a node.
        store: Name, for errors.

    Raises:
        KeyNotFoundError: A key does not exist.
        InvalidRequestError: A key names a value, or a dimension that the tensor does not have.
    """
    changed: dict[Path, Entry] = {path: _make_nested_leaf(values[path]) for path in _find_nested_rows(spec, values)}
    for path, dims in _list_paths(ragged).items():
        entry = changed.get(path) or spec.find(path, store=store)
        if isinstance(entry, Node):
            changed[path] = _pack_node(entry, path, _find_batch_size(spec, path))
        elif isinstance(entry, TensorLeaf):
            changed[path] = _make_ragged_tensor(entry, path, dims, spec)
        elif entry.ragged is None:
            raise _make_ragged_error(path, "a non-tensor value has no dimensions")
    root = spec.root
    if root.inner is not None and root.batch_size:
        return Spec(wrap_element(root))
    if not changed and root.stack_dim is None and not has_stack(root):
        return spec
    if isinstance(changed.get(()), Node):
        return Spec(changed[()])  # type: ignore[arg-type]  # a node, as was just seen
    return Spec(_mark_stacks(replace_entries(root, changed), ()))


def widen_row(row: Spec, batch: Captured) -> Spec | None:
    """Returns the structure of a row that is ragged where a batch is; None if nothing is, or if more differs.

    Args:
        row: Structure of a table's row.
        batch: Rows that do not fit it, captured without a given structure.
    """
    changed: dict[Path, Entry] = {}
    wanted = dict(row.tensors)
    for path, leaf in batch.spec.values:
        held = _find_entry(row, path)
        if isinstance(held, Node) and held.inner is None:
            changed[path] = _pack_node(held, path, _find_batch_size(row, path), is_one_structure=False)
        elif path in wanted and leaf.ragged is not None and leaf.ragged.dtype:
            entry = _widen_entry(row, path, wanted[path], leaf, batch.values[path])
            if entry is None:
                return None
            changed[path] = entry
        elif isinstance(held, ValueLeaf) and held.ragged is None and leaf.ragged is not None:
            changed[path] = ValueLeaf(leaf.batch_size[1:], len(leaf.batch_size) > 1, leaf.ragged)
    for path, tensor_leaf in batch.spec.tensors:
        around = batch.spec.find(path[:-1])
        is_row_of_stack = isinstance(around, Node) and around.stack_dim == 0
        old = wanted.get(path)
        if old is not None and is_row_of_stack and _has_other_size(old, tensor_leaf):
            free = tuple(dim for dim, size in enumerate(old.shape) if size != tensor_leaf.shape[dim + 1])
            changed[path] = _make_ragged_tensor(old, path, free, row, Form.STACK)
    if not changed:
        return None
    if () in changed:
        root = changed[()]
        return Spec(root) if isinstance(root, Node) else None
    return Spec(_mark_stacks(replace_entries(row.root, changed), ()))


def is_widened(row: Spec, found: Spec) -> bool:
    """Returns whether a structure is that of a row, except for its ragged entries."""
    return found.has_ragged and _is_node_widened(row.root, found.root)


def _is_node_widened(row: Node, found: Node) -> bool:
    if row.tensorclass != found.tensorclass:
        return False
    if found.inner is not None:
        return len(found.inner) == len(row.shown_batch_size) - len(found.batch_size)
    theirs = dict(found.entries)
    if row.batch_size != found.batch_size or theirs.keys() != dict(row.entries).keys():
        return False
    return all(_is_entry_widened(entry, theirs[key]) for key, entry in row.entries)


def _is_entry_widened(row: Entry, found: Entry) -> bool:
    if isinstance(row, Node):
        return isinstance(found, Node) and _is_node_widened(row, found)
    if isinstance(found, ValueLeaf) and found.ragged is not None and isinstance(row, TensorLeaf):
        shape = (*found.batch_size, *found.ragged.shape)
        is_alike = row.dtype == found.ragged.dtype and len(shape) == len(row.shape)
        return is_alike and all(size in (-1, old) for size, old in zip(shape, row.shape, strict=True))
    return type(row) is type(found) and (row == found or isinstance(row, ValueLeaf))


def _find_entry(row: Spec, path: Path) -> Entry | None:
    try:
        return row.find(path)
    except KeyNotFoundError:
        return None


def _widen_entry(row: Spec, path: Path, old: TensorLeaf, leaf: ValueLeaf, elements: Any) -> ValueLeaf | None:
    """Returns a tensor of a row as a ragged leaf, in the form that it has in a batch; None if it is of another kind."""
    ragged = leaf.ragged
    depth = len(_find_batch_size(row, path))
    is_alike = ragged is not None and ragged.dtype == old.dtype and len(ragged.shape) == len(old.shape) - depth
    if ragged is None or not is_alike or len(leaf.batch_size) != depth + 1:
        return None
    shapes = {tuple(element.shape) for element in flatten_elements(elements, depth + 1)}
    sizes = [{shape[dim] for shape in shapes} | {old.shape[depth + dim]} for dim in range(len(ragged.shape))]
    is_jagged = ragged.form is Form.JAGGED
    free = tuple(ragged.shape[dim] == -1 if is_jagged else len(found) > 1 for dim, found in enumerate(sizes))
    if is_jagged and any(len(found) > 1 and not is_free for found, is_free in zip(sizes, free, strict=True)):
        return None
    if not any(free) and free:
        free = (True, *free[1:])  # nothing else declares where strided ones of one size may differ
    shape = tuple(-1 if is_free else size for is_free, size in zip(free, old.shape[depth:], strict=True))
    return ValueLeaf(old.shape[:depth], bool(depth), ragged._replace(shape=shape))


def _has_other_size(old: TensorLeaf, new: TensorLeaf) -> bool:
    return old.dtype == new.dtype and len(old.shape) + 1 == len(new.shape) and old.shape != new.shape[1:]


def list_declared_paths(spec: Spec, values: Mapping[Path, Any], ragged: Declared) -> set[Path]:
    """Returns the entries of a row that a user declared ragged; arguments as in ``declare_ragged``."""
    return {*_list_paths(ragged), *_find_nested_rows(spec, values)}


def make_zeros(td: Any) -> Any:
    """Returns a tensordict on the CPU with the same structure and values and with zeros as tensors.

    Accepts meta and fake ones.
    """
    with unset_fake_temporarily():
        found = change_tensors(read_into_memory(td).clone(recurse=False), _zero_like)
        return found if found.device is None else found.to("cpu")


def _zero_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        return torch.zeros_like(tensor)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def make_first_values(
    spec: Spec,
    values: Mapping[Path, Any],
    batch_size: tuple[int, ...],
    zeros: Mapping[Path, Any] = MappingProxyType({}),
) -> tuple[Spec, dict[Path, Any]]:
    """Returns the first content of a store that was made like a row: the row's values.

    Zeros or nothing where it is ragged.

    Args:
        spec: Structure of the store, reduced to its values.
        values: Values of the row.
        batch_size: Batch size of the store that precedes the row's.
        zeros: Initial elements of the ragged entries, by path; none if it has no path.

    Returns:
        The structure, with one value for all rows if that suffices, and the values.
    """
    changed: dict[Path, Entry] = {}
    found: dict[Path, Any] = {}
    for path, leaf in spec.values:
        ragged = leaf.ragged
        if path in zeros:
            found[path] = _repeat(zeros[path], batch_size)
            continue
        if ragged is not None and ragged.dtype:
            changed[path] = leaf._replace(per_row=False)
            found[path] = torch.zeros([max(size, 0) for size in ragged.shape], dtype=to_torch(ragged.dtype))
            continue
        is_node = isinstance(spec.find(path), Node)
        found[path] = None if is_node else values[path]
        if leaf.per_row:
            found[path] = _repeat(found[path], leaf.batch_size if is_node else batch_size)
    return Spec(replace_entries(spec.root, changed)), found


def _repeat(value: Any, batch_size: tuple[int, ...]) -> Any:
    for size in reversed(batch_size):
        value = [value] * size
    return value


def _list_paths(ragged: Declared) -> dict[Path, tuple[int, ...]]:
    if ragged is None:
        return {}
    items = (
        ragged.items()
        if isinstance(ragged, Mapping)
        else [(key, 0) for key in ([ragged] if isinstance(ragged, str) else ragged)]
    )
    found: dict[Path, tuple[int, ...]] = {}
    for key, dims in items:
        path = (key,) if isinstance(key, str) else key
        if not isinstance(path, tuple) or not all(isinstance(part, str) for part in path):
            raise InvalidRequestError(argument="ragged", reason=f"{key!r} is not a key")
        sizes = (dims,) if isinstance(dims, int) else tuple(dims)
        if not sizes or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in sizes):
            raise InvalidRequestError(argument="ragged", reason=f"{dims!r} of {key!r} are not dimensions")
        found[path] = sizes
    return found


def _make_ragged_tensor(
    leaf: TensorLeaf, path: Path, dims: tuple[int, ...], spec: Spec, form: Form | None = None
) -> ValueLeaf:
    batch_size = _find_batch_size(spec, path)
    free = set()
    for dim in dims:
        at = dim + len(leaf.shape) if dim < 0 else dim
        if not len(batch_size) <= at < len(leaf.shape):
            where = f" after its batch dimensions {list(batch_size)}" if batch_size else ""
            raise _make_ragged_error(path, f"a tensor of shape {list(leaf.shape)} has no dimension {dim}{where}")
        free.add(at)
    shape = tuple(-1 if dim in free else size for dim, size in enumerate(leaf.shape))[len(batch_size) :]
    # A jagged tensor has one batch dimension and one dimension that differs, which is a row's first.
    own_form = Form.JAGGED if free == {0} else Form.STACK
    return ValueLeaf(batch_size, bool(batch_size), Ragged(form or own_form, leaf.dtype, shape))


def _pack_node(node: Node, path: Path, around: tuple[int, ...] = (), *, is_one_structure: bool = True) -> Node:
    """Returns a node whose elements carry their own structure.

    Args:
        around: Batch size of the node around it, each element of which is an element here.
        is_one_structure: Whether elements can differ only along a batch dimension of their own.
    """

    def free(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-1, *shape[1:]) if shape else shape

    if node.inner is not None:
        return node
    element = node
    for _ in around:
        element = drop_batch_dim(element, 0)
    inner, entries = summarise([element], around)
    if is_one_structure and not inner:
        raise _make_ragged_error(path, "its rows have no batch dimension that could differ")
    if inner:
        inner, entries = free(inner), tuple((key, reshape_known(entry, free)) for key, entry in entries)
    stack_dim = find_packed_stack_dim(None if node.stack_dim == -1 else node.stack_dim, len(around))
    names = None if node.names is None or not any(node.names[: len(around)]) else node.names[: len(around)]
    return Node(around, names, node.device, node.tensorclass, entries, stack_dim=stack_dim, inner=inner)


def _find_nested_rows(spec: Spec, values: Mapping[Path, Any]) -> list[Path]:
    return [
        path
        for path, leaf in spec.values
        if not leaf.batch_size and getattr(values.get(path), "is_nested", False) and values[path].size(0) == 1
    ]


def _make_nested_leaf(tensor: Any) -> ValueLeaf:
    row, _ = make_nested_leaf(tensor, (1,))
    return row._replace(batch_size=(), per_row=False)


def _find_batch_size(row: Spec, path: Path) -> tuple[int, ...]:
    """Returns the batch size of the node around an entry of a row."""
    parent = row.find(path[:-1]) if path else None
    return parent.batch_size if isinstance(parent, Node) else ()


def _mark_stacks(node: Node, path: Path, num_dims: int = 0) -> Node:
    """Returns a tree with lazy stacks of rows packed, and with marks on nodes whose rows can only be stacked lazily.

    ``num_dims`` is that of the batch around the node: a stack along one of these has the same size in every row.
    """
    if node.inner is not None or (node.stack_dim is not None and 0 <= node.stack_dim < num_dims):
        return node
    if node.stack_dim is not None and node.stack_dim >= 0:
        return _pack_node(node, path, node.batch_size[:num_dims])
    depth = len(node.batch_size)
    entries = tuple(
        (key, _mark_stacks(entry, (*path, key), depth) if isinstance(entry, Node) else entry)
        for key, entry in node.entries
    )
    has_pieces = any(
        isinstance(entry, ValueLeaf) and entry.ragged is not None and entry.ragged.form is Form.STACK
        for _, entry in entries
    )
    return node._replace(entries=entries, stack_dim=-1 if has_pieces else None)


def _make_ragged_error(path: Path, reason: str) -> InvalidRequestError:
    return InvalidRequestError(argument="ragged", reason=f"key {show(path) if path else '()'}: {reason}")
