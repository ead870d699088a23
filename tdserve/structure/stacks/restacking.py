"""Rebuilds a stack along any dimension from the elements of its batch.

A tensordict that held several elements was split into them. If they have one structure, it is joined again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
    is_tensorclass,
)

from tdserve.structure.stacks.elements import make_single_value, unbind, unwrap
from tdserve.structure.tensordict_private import entries_of, get_set_fields, is_value_class, new_tensordict
from tdserve.structure.tensordicts.instances import find_content, make_instance
from tdserve.structure.tensors.torch_types import to_indexable, view_bytes
from tdserve.values.value_codec import is_same

Names = tuple[str | None, ...]


def build_stack(
    rows: Sequence[Any], batch_size: tuple[int, ...], dim: int, device: torch.device | None, names: Any
) -> LazyStackedTensorDict:
    """Returns the lazy stack of these rows."""
    if not rows:
        return make_empty_stack(batch_size, dim, device)
    return LazyStackedTensorDict(*rows, stack_dim=dim, stack_dim_name=None if names is None else names[dim])


def make_empty_stack(batch_size: tuple[int, ...], stack_dim: int, device: torch.device | None) -> LazyStackedTensorDict:
    """Returns a lazy stack without rows; ``batch_size`` has 0 at ``stack_dim``."""
    rest = [max(size, 0) for size in batch_size[:stack_dim] + batch_size[stack_dim + 1 :]]
    return LazyStackedTensorDict(batch_size=rest, stack_dim=stack_dim, device=device)


def restack(
    elements: Sequence[Any],
    batch_size: tuple[int, ...],
    dim: int,
    device: torch.device | None,
    empty: tuple[int, ...],
    names: Sequence[str | None] | None = None,
) -> Any:
    """Builds a lazy stack along one dimension from elements; its rows are dense if elements have one structure.

    Args:
        elements: In C order over ``batch_size``; None for one that was never written.
        batch_size: Batch size of the elements, at least one dimension.
        dim: One of these dimensions, or of those of the elements after them; -1 makes a single row of all elements.
        device: Device of the stack.
        empty: Batch size of an element that was never written.
        names: Names of the dimensions of ``batch_size``; None if none is named. The elements have names of their own.
    """
    own: Names = (None,) * len(batch_size) if names is None else tuple(names)
    if 0 in batch_size:
        return _make_empty((*batch_size, *empty), dim, device, (*own, *(None,) * len(empty)))
    parts = [TensorDict({}, empty, device=device) if part is None else part for part in map(unwrap, elements)]
    if dim < 0:
        return join(parts, batch_size, own)
    depth = len(batch_size)
    if dim < depth:
        rest = batch_size[:dim] + batch_size[dim + 1 :]
        rows = [join(group, rest, own[:dim] + own[dim + 1 :]) for group in group_parts(parts, batch_size, dim)]
        return LazyStackedTensorDict(*rows, stack_dim=dim, stack_dim_name=own[dim])
    sizes = {tuple(part.batch_size)[dim - depth : dim - depth + 1] for part in parts}
    if sizes == {(0,)}:
        return make_empty_stack((*batch_size, *parts[0].batch_size), dim, device)
    if len(sizes) > 1 or () in sizes:  # they differ in length, so that no single tensordict can hold them
        pieces: list[Any] = [
            restack(group, batch_size[1:], dim - 1, device, empty, own[1:]) if depth > 1 else group[0]
            for group in group_parts(parts, batch_size, 0)
        ]
        return LazyStackedTensorDict(*pieces, stack_dim=0, stack_dim_name=own[0])
    columns = zip(*(unbind(part, dim - depth) for part in parts), strict=True)
    return LazyStackedTensorDict(
        *(join(column, batch_size, own) for column in columns),
        stack_dim=dim,
        stack_dim_name=_get_names(parts[0])[dim - depth],
    )


def join(parts: Sequence[Any], sizes: tuple[int, ...], names: Names) -> Any:
    """Joins tensordicts or instances into one with more batch dimensions in front.

    Dense if possible, else a lazy stack.

    Args:
        parts: In C order over ``sizes``, at least one.
        sizes: Sizes of the new dimensions.
        names: Names of these dimensions.
    """
    if not sizes:
        return parts[0]
    found = _join_dense(parts, sizes, names)
    if found is not None:
        return found
    for dim in range(len(sizes)):  # they may differ along one dimension only
        rest, rest_names = sizes[:dim] + sizes[dim + 1 :], names[:dim] + names[dim + 1 :]
        groups = group_parts(parts, sizes, dim)
        rows = [_join_dense(group, rest, rest_names) if rest else group[0] for group in groups]
        if all(row is not None for row in rows):
            return LazyStackedTensorDict(*rows, stack_dim=dim, stack_dim_name=names[dim])
    rows = [join(group, sizes[1:], names[1:]) for group in group_parts(parts, sizes, 0)]
    return LazyStackedTensorDict(*rows, stack_dim=0, stack_dim_name=names[0])


def _make_empty(shape: tuple[int, ...], dim: int, device: torch.device | None, names: Names) -> Any:
    """Returns a stack without elements; its rows have no keys, since only elements have them."""
    own_names: Any = list(names) if any(names) else None
    if dim < 0:
        return TensorDict({}, shape, device=device, names=own_names)
    rest = own_names and own_names[:dim] + own_names[dim + 1 :]
    rows = [
        TensorDict({}, shape[:dim] + shape[dim + 1 :], device=device, names=rest and rest.copy())
        for _ in range(shape[dim])
    ]
    return build_stack(rows, shape, dim, device, own_names)


def group_parts(parts: Sequence[Any], sizes: tuple[int, ...], dim: int) -> list[list[Any]]:
    """Groups parts by their position along one of the dimensions."""
    stride = math.prod(sizes[dim + 1 :])
    groups: list[list[Any]] = [[] for _ in range(sizes[dim])]
    for number, part in enumerate(parts):
        groups[number // stride % sizes[dim]].append(part)
    return groups


def _join_dense(parts: Sequence[Any], sizes: tuple[int, ...], names: Names) -> Any:
    """Joins all parts densely; None if they differ in structure."""
    first = parts[0]
    kind = type(first)
    if any(type(part) is not kind for part in parts):
        return None
    if kind is TensorDict:
        return _join_tds(parts, sizes, names)
    if isinstance(first, LazyStackedTensorDict):
        return _join_stacks(parts, sizes, names)
    if not (is_tensorclass(kind) or issubclass(kind, TypedTensorDict)):
        return None
    besides = [get_set_fields(part) for part in parts]
    if not all(is_same(beside, besides[0]) for beside in besides[1:]):
        return None
    content = _join_dense([find_content(part) for part in parts], sizes, names)
    return None if content is None else make_instance(kind, content, dict(besides[0]))


def _join_tds(parts: Sequence[TensorDict], sizes: tuple[int, ...], names: Names) -> TensorDict | None:
    first = parts[0]
    keys = entries_of(first).keys()
    own_names = _get_names(first)
    for part in parts:
        is_alike = part.batch_size == first.batch_size and part.device == first.device
        if not is_alike or entries_of(part).keys() != keys or _get_names(part) != own_names:
            return None
    source: Any = {}
    for key in keys:
        entry = _join_entries([entries_of(part)[key] for part in parts], sizes, names, own_names)
        if entry is None:
            return None
        source[key] = entry
    batch_size = torch.Size((*sizes, *first.batch_size))
    for entry in source.values():
        if type(entry) is UnbatchedTensor:
            entry.batch_size = batch_size
    all_names: Any = [*names, *own_names]
    td: TensorDict = new_tensordict(
        source, batch_size=batch_size, device=first.device, names=all_names if any(all_names) else None, nested=False
    )
    return td.lock_() if all(part.is_locked for part in parts) else td


def _join_stacks(parts: Sequence[Any], sizes: tuple[int, ...], names: Names) -> LazyStackedTensorDict | None:
    """Joins stacks along one dimension into one, as ``torch.stack`` accepts them."""
    dim = parts[0].stack_dim
    num_rows = len(parts[0].tensordicts)
    own_names = _get_names(parts[0])
    for part in parts:
        if part.stack_dim != dim or len(part.tensordicts) != num_rows or _get_names(part) != own_names:
            return None
    if not num_rows:
        return None
    rows = [join([part.tensordicts[number] for part in parts], sizes, names) for number in range(num_rows)]
    return LazyStackedTensorDict(*rows, stack_dim=len(sizes) + dim, stack_dim_name=own_names[dim])


def _join_entries(column: list[Any], sizes: tuple[int, ...], names: Names, own_names: Names) -> Any:
    """Joins the entries at one key; None if they differ. ``own_names`` are those of the dimensions of their holder."""
    first = column[0]
    kind = type(first)
    if kind is UnbatchedTensor:
        is_one = all(type(item) is kind and _is_equal(item, first) for item in column)
        make: Any = UnbatchedTensor
        return make(_unwrap_tensor(first)) if is_one else None
    is_value = [isinstance(item, NonTensorStack) or is_value_class(type(item)) for item in column]
    if any(is_value):
        return _join_values(column, sizes, names, own_names) if all(is_value) else None
    if isinstance(first, torch.Tensor):
        return _join_tensors(column, sizes)
    if any(isinstance(item, torch.Tensor) or item.batch_size != first.batch_size for item in column):
        return None
    return join(column, sizes, names)


def _join_tensors(column: list[Any], sizes: tuple[int, ...]) -> torch.Tensor | None:
    first = column[0]
    for item in column:
        if (
            not isinstance(item, torch.Tensor)
            or type(item) is UnbatchedTensor
            or item.is_nested
            or first.is_nested
            or item.layout is not first.layout
        ):
            return None
        if (item.dtype, item.shape, item.requires_grad) != (first.dtype, first.shape, first.requires_grad):
            return None
    found = torch.stack([to_indexable(item.detach()) for item in column]).view(first.dtype)
    return found.view(*sizes, *first.shape).requires_grad_(first.requires_grad)


def _join_values(column: Sequence[Any], sizes: tuple[int, ...], names: Names, own_names: Names) -> Any:
    """Returns one value if all are the same, else a stack of them."""
    first = column[0]
    if any(item.batch_size != first.batch_size for item in column):
        return None
    is_one = all(type(item) is NonTensorData and is_same(item.data, first.data) for item in column)
    if is_one:
        shape = (*sizes, *first.batch_size)
        all_names = [*names, *own_names, *(None,) * (len(first.batch_size) - len(own_names))]
        return make_single_value(first.data, shape, first.device, all_names if any(all_names) else None)
    return _make_value_stack(column, sizes, names)


def _make_value_stack(column: Sequence[Any], sizes: tuple[int, ...], names: Names) -> Any:
    if not sizes:
        return column[0]
    rows = [_make_value_stack(group, sizes[1:], names[1:]) for group in group_parts(column, sizes, 0)]
    return NonTensorStack(*rows, stack_dim=0, stack_dim_name=names[0])


def _get_names(td: Any) -> Names:
    """Returns one name per batch dimension."""
    return tuple(td.names)


def _unwrap_tensor(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.detach().as_subclass(torch.Tensor)
    return plain


def _is_equal(one: Any, other: Any) -> bool:
    mine, theirs = _unwrap_tensor(one), _unwrap_tensor(other)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    return torch.equal(*(view_bytes(item.contiguous()) for item in (mine, theirs)))
