"""The elements of a batch as (nested) lists, as a packed node or a leaf of a nested tensor holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TypedTensorDict, is_tensorclass

from tdserve.structure.stacks.common_structure import CapturedPart
from tdserve.structure.tensordict_private import get_set_fields, make_value, new_tensordict, stored_fields
from tdserve.structure.tensordicts.instances import find_content, make_instance
from tdserve.structure.tensors.pieces import Jagged, Pieces, split_jagged
from tdserve.structure.tensors.torch_types import from_torch
from tdserve.structure.trees.changes import set_locks
from tdserve.structure.trees.nodes import PACKED, Form, Node, Ragged, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Path, Spec
from tdserve.values.supported import ATOMS
from tdserve.values.value_codec import is_same

_AS_THEY_ARE = ATOMS | {dict, list, tuple}


class Note(NamedTuple):
    """The structure of the stacked tensordict that an element comes from, where the packed node describes another.

    Attributes:
        spec: Its root is a packed node over the elements that were written together, without entries. ``members`` are
            the tensordicts that they came from: a single one with the ``stack_dim`` -1, else those of which each
            element has a row.
        position: Position of this element among them, in C order.
    """

    spec: Spec
    position: int


class Element(NamedTuple):
    """A captured element of a packed node or leaf. An element that was read without a note is the bare entry instead.

    Attributes:
        entry: The element itself.
        tree: Its structure and leaves; None if it is an entry of a leaf that is captured later.
        note: Its member, if it has a note of that.
        is_entry: Whether it is a tensor or a non-tensor entry: ``tree`` is that of a tensordict around it, or of a
            stack of such entries.
    """

    entry: Any
    tree: CapturedPart | None = None
    note: Note | None = None
    is_entry: bool = False

    @staticmethod
    def from_part(entry: Any, part: CapturedPart) -> Element:
        """Makes an element of a captured part; a stack whose rows differ is the only element of its part."""
        root = part.root
        if root.inner is None or root.tensorclass is not None:
            return Element(entry, part)
        stack: Element = part.values[part.at]
        return stack._set_root(stack.tree.root._replace(is_locked=root.is_locked)) if stack.tree is not None else stack

    @staticmethod
    def from_rows(
        stack: LazyStackedTensorDict, rows: list[Element], path: Path = (), *, is_locked: bool = False
    ) -> Element:
        """Makes an element of a stack whose rows differ: a packed node that the rows are the elements of."""
        dim = stack.stack_dim
        name = stack.names[dim]
        names = None if name is None else (name,)
        inner = (-1,) * (len(stack.batch_size) - 1)
        root = Node((len(rows),), names, None, None, (), stack_dim=dim, inner=inner, is_locked=is_locked)
        return Element(stack, CapturedPart(root, {}, {path: rows}, path))

    def remove_locks(self) -> Element:
        """Returns this element unlocked, where its lock is recorded elsewhere."""
        return self if self.tree is None else self._set_root(set_locks(self.tree.root, False))

    def _set_root(self, root: Node) -> Element:
        return self if self.tree is None else self._replace(tree=self.tree._replace(root=root))


def unwrap(elements: Any) -> Any:
    """Returns the entries of (nested lists of) elements."""
    if isinstance(elements, list):
        return [unwrap(element) for element in elements]
    return elements.entry if type(elements) is Element else elements


def has_notes(elements: Any) -> bool:
    """Returns whether any of (nested lists of) elements has a note."""
    if isinstance(elements, list):
        return any(map(has_notes, elements))
    return type(elements) is Element and elements.note is not None


def split_elements(td: Any, batch_size: tuple[int, ...]) -> Any:
    """Returns the elements of a tensordict, or of a stack of values, over the first dimensions of its batch.

    Args:
        td: Not an instance around a lazy stack, nor a TensorDictParams.
        batch_size: Batch size of the elements; () returns the tensordict itself.
    """
    if not batch_size:
        return td
    rows = list(unbind(td, 0))
    return rows if len(batch_size) == 1 else [split_elements(row, batch_size[1:]) for row in rows]


def split_rows(stack: LazyStackedTensorDict, dim: int) -> Sequence[Any]:
    """Returns the rows of a lazy stack along any dimension; along its own these are the ones that it holds."""
    if stack.stack_dim == dim:
        held: list[Any] = stack.tensordicts
        return held
    if any(map(_is_instance, stack.tensordicts)):
        return _split_instances(stack, dim)
    rows: tuple[Any, ...] = stack.unbind(dim)
    if any(stack.names):
        for row in rows:
            row.names = stack.names[:dim] + stack.names[dim + 1 :]  # tensordict loses them
    return rows


def _split_instances(stack: LazyStackedTensorDict, dim: int) -> list[Any]:
    """Returns rows as stacks of instances, where tensordict would make instances around stacks of them."""
    at = stack.stack_dim - (dim < stack.stack_dim)
    columns = [unbind(member, dim - (stack.stack_dim < dim)) for member in stack.tensordicts]
    name = stack.names[stack.stack_dim]
    return [LazyStackedTensorDict(*row, stack_dim=at, stack_dim_name=name) for row in zip(*columns, strict=True)]


def _is_instance(td: Any) -> bool:
    return isinstance(td, TypedTensorDict) or (is_tensorclass(td) and not isinstance(td, NonTensorData))


def unbind(td: Any, dim: int) -> Sequence[Any]:
    """Returns the rows along a dimension; those of an instance as instances."""
    if isinstance(td, LazyStackedTensorDict):
        return split_rows(td, dim)
    if not _is_instance(td):
        rows: Sequence[Any] = td.unbind(dim)
        return rows
    beside = get_set_fields(td)
    return [make_instance(type(td), row, dict(beside)) for row in unbind(find_content(td), dim)]


def is_by_rows(td: Any, depth: int) -> bool:
    """Returns whether a tensordict is stacked lazily along its first dimensions, one after the other."""
    if not isinstance(td, LazyStackedTensorDict) or td.stack_dim:
        return False
    return depth == 1 or all(is_by_rows(row, depth - 1) for row in td.tensordicts)


def find_stack_dim(td: Any, depth: int, num_shown: int) -> int | None:
    """Returns the ``stack_dim`` of a packed node, from which elements over ``depth`` dimensions are stacked again."""
    if not depth or not isinstance(td, LazyStackedTensorDict) or td.stack_dim >= num_shown or is_by_rows(td, depth):
        return None
    dim: int = td.stack_dim
    return dim


def restack_by_rows(td: Any) -> Any:
    """Returns a lazy stack along another dimension than the first as a stack of its rows; anything else unchanged."""
    if not isinstance(td, LazyStackedTensorDict) or not td.stack_dim:
        return td
    return LazyStackedTensorDict(*split_elements(td, tuple(td.batch_size[:1])), stack_dim=0, stack_dim_name=td.names[0])


def list_values(stack: NonTensorStack) -> Any:
    """Returns ``stack.tolist()``, at a third of its cost for plain members."""
    if type(stack) is NonTensorStack and stack.stack_dim == 0 and len(stack.batch_size) == 1:
        members: list[Any] = stack.tensordicts
        if {NonTensorData}.issuperset(map(type, members)):
            try:
                values = [fields["data"] for fields in map(stored_fields, members)]
            except KeyError:
                return stack.tolist()
            if _AS_THEY_ARE.issuperset(map(type, values)):  # shared values are wrapped in others
                return values
    return stack.tolist()


def make_single_value(value: Any, batch_size: tuple[int, ...], device: torch.device | None, names: Any) -> Any:
    """Returns one value for a batch, without the conversions that the constructor makes of some values."""
    td = new_tensordict({}, batch_size=torch.Size(batch_size), device=device, names=names)
    return make_value(td, value)


def flatten_elements(elements: Any, num_dims: int) -> list[Any]:
    """Flattens nested lists of elements, in C order; for no dimensions there is a single element."""
    if not num_dims:
        return [elements]
    if num_dims == 1:
        return list(elements)
    return [element for row in elements for element in flatten_elements(row, num_dims - 1)]


def nest_list(elements: list[Any], batch_size: tuple[int, ...]) -> list[Any]:
    """Reverses ``flatten_elements``, for at least one dimension."""
    for dim in range(len(batch_size) - 1, 0, -1):
        size = batch_size[dim]
        elements = [elements[row * size : (row + 1) * size] for row in range(math.prod(batch_size[:dim]))]
    return elements


def make_nested_leaf(tensor: torch.Tensor, batch_size: tuple[int, ...]) -> tuple[ValueLeaf, Any]:
    """Returns the stored form of a nested tensor in a tensordict of this batch size, and its elements.

    If no dimension can number its components it is one element.
    """
    if not batch_size:
        return ValueLeaf((), False, PACKED), tensor.detach()
    components = split_jagged(tensor)
    depth = len(batch_size)
    found = Jagged.from_tensor(tensor)
    if found is not None:
        sizes = list(found.values.shape)
        sizes[found.ragged_dim - 1] = -1
        has_lengths = found.lengths is not None
        ragged = Ragged(Form.JAGGED, from_torch(found.values.dtype), tuple(sizes[depth - 1 :]), has_lengths)
    else:
        ragged = Ragged(Form.NESTED, from_torch(tensor.dtype), (-1,) * (tensor.dim() - depth))
    elements: Any = components if depth == 1 else [_split_tensor(component, depth - 1) for component in components]
    return ValueLeaf(batch_size, True, ragged), elements


def convert_to_ragged(tensor: torch.Tensor, wanted: ValueLeaf, leaf: TensorLeaf) -> tuple[ValueLeaf, Any] | None:
    """Converts a dense tensor to elements of a ragged leaf; None if its dtype or number of dimensions differs."""
    ragged = wanted.ragged
    depth = len(wanted.batch_size)
    if ragged is None or leaf.dtype != ragged.dtype or len(leaf.shape) - depth != len(ragged.shape):
        return None
    batch_size, shape = leaf.shape[:depth], leaf.shape[depth:]
    elements: Any = tensor
    if depth == 1:
        elements = Pieces.from_rows(tensor)
    elif depth:
        elements = _split_tensor(tensor, depth)
    declared = ragged._replace(shape=_declare_shape(shape, ragged.shape))
    return ValueLeaf(batch_size, bool(depth), declared), elements


def convert_to_dense(elements: Any, leaf: ValueLeaf, wanted: TensorLeaf) -> torch.Tensor | None:
    """Converts the elements of a ragged leaf to a dense tensor; None if they differ in shape."""
    ragged = leaf.ragged
    if ragged is None or ragged.dtype != wanted.dtype or len(leaf.batch_size) + len(ragged.shape) != len(wanted.shape):
        return None
    pieces = Pieces.from_tensors(
        flatten_elements(elements, len(leaf.batch_size)) if len(leaf.batch_size) != 1 else elements, ragged
    )
    if not len(pieces):
        return torch.empty((*leaf.batch_size, *wanted.shape[len(leaf.batch_size) :]), dtype=pieces.dtype)
    dense = pieces.stack()
    return None if dense is None else dense.view(*leaf.batch_size, *dense.shape[1:])


def to_declared(elements: Any, leaf: ValueLeaf, wanted: Ragged) -> ValueLeaf:
    """Returns a ragged leaf in the declared form, if it has the dtype and the number of dimensions.

    Its shape shows where elements do not fit.
    """
    ragged = leaf.ragged
    if ragged is None or ragged.dtype != wanted.dtype or len(ragged.shape) != len(wanted.shape):
        return leaf
    if ragged.shape != wanted.shape and leaf.batch_size:
        flat = elements if len(leaf.batch_size) == 1 else flatten_elements(elements, len(leaf.batch_size))
        shapes = {tuple(element.shape) for element in flat} or {ragged.shape}
        ragged = ragged._replace(
            shape=tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))
        )
    return leaf._replace(ragged=wanted._replace(shape=_declare_shape(ragged.shape, wanted.shape)))


def _declare_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-1 if free == -1 else size for size, free in zip(shape, wanted, strict=True))


def _split_tensor(tensor: torch.Tensor, depth: int) -> Any:
    return list(tensor) if depth == 1 else [_split_tensor(row, depth - 1) for row in tensor]


class OneValue(NamedTuple):
    """A single value in place of a list, which all elements there share."""

    value: Any


def with_one_value(values: dict[Path, Any], spec: Spec, stored: Spec) -> dict[Path, Any]:
    """Replaces the values of a row by a single one, where the table has one for all elements of a row.

    Args:
        values: Values of every leaf of ``spec``, by path.
        spec: Structure of the rows.
        stored: Structure of the table.
    """
    paths: tuple[Path, ...] | None = stored.memo.get("one value")
    if paths is None:
        leaves = [(path, leaf) for path, leaf in stored.values if leaf.ragged is None and not leaf.is_unbatched]
        paths = tuple(path for path, leaf in leaves if not leaf.per_row and len(leaf.batch_size) > 1)
        stored.memo["one value"] = paths
    if not paths:
        return values
    found = dict(values)
    for path, leaf in spec.values:
        if path in paths and leaf.per_row:
            found[path] = [_get_one(row, len(leaf.batch_size) - 1) for row in values[path]]
    return found


def _get_one(row: Any, num_dims: int) -> Any:
    held = flatten_elements(row, num_dims)
    is_one = bool(held) and all(is_same(value, held[0]) for value in held[1:])
    return OneValue(held[0]) if is_one else row
