"""Rebuilds the stacked tensordicts of a packed node from their elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.structure.captures.capture import capture_as
from tdserve.structure.captures.captured import Captured
from tdserve.structure.captures.rows import repeat_value
from tdserve.structure.stacks.elements import Element, Note, flatten_elements, nest_list, unbind, unwrap
from tdserve.structure.stacks.restacking import group_parts
from tdserve.structure.tensors.torch_types import to_indexable, to_torch
from tdserve.structure.trees.changes import rebatch, rename_dims
from tdserve.structure.trees.nodes import PACKED, DimNames, Form, Node, Path, ValueLeaf
from tdserve.structure.trees.tree import Spec, check_matches
from tdserve.values.value_codec import is_same


def gather(
    members: Sequence[Spec], elements: Any, batch_size: tuple[int, ...], dim: int, names: DimNames
) -> list[Captured | list[Any]] | None:
    """Returns each member's content, or its elements if they differ from it; None if the members are unknown.

    Args:
        members: What was stacked, without the stacked dimension, on the CPU; none if only the elements show it.
        elements: Nested lists over ``batch_size``.
        batch_size: Batch size of the elements, at least one dimension.
        dim: One of these dimensions, or of those of the elements after them; -1: all elements are of one member.
        names: Names of the dimensions of a member that number its elements.
    """
    given = flatten_elements(elements, len(batch_size))
    if any(part is None for part in given):
        return None
    depth = len(batch_size)
    columns = _find_columns(unwrap(given), len(members), batch_size, dim)
    if columns is None:
        return None
    known = members if len(members) == len(columns) else ()
    notes = [part.note if type(part) is Element else None for part in given]
    if not known and all(note is None for note in notes):
        return None
    around = batch_size[:dim] + batch_size[dim + 1 :] if dim >= 0 else batch_size
    if dim >= depth:
        noted = [
            find_structure(notes, around, names, number=number, behind=dim - depth) for number in range(len(columns))
        ]
    else:
        groups = group_parts(notes, batch_size, dim) if dim >= 0 else [notes]
        noted = [find_structure(group, around, names) for group in groups]
    found: list[Captured | list[Any]] = []
    for number, column in enumerate(columns):
        structures = [spec for spec in (noted[number], *known[number : number + 1]) if spec is not None]
        found.append(_gather_member(structures, column, around))
    return found


def find_structure(
    notes: Sequence[Note | None], sizes: tuple[int, ...], names: DimNames, *, number: int = 0, behind: int = -1
) -> Spec | None:
    """Returns the structure of the member that elements belong to; None if they disagree, or have no notes.

    An element that was written into a member on its own has no note, and need not have changed its structure.

    Args:
        notes: Notes of the elements of one member, in C order.
        sizes: Sizes of the dimensions that number them.
        names: Names of these dimensions.
        number: Number of the member.
        behind: Dimension of each element that numbers the members; -1: none of them.
    """
    given = [note for note in notes if note is not None]
    if not given or any(note.spec != given[0].spec for note in given):
        return None
    spec = given[0].spec
    root = spec.root
    noted_dim = -1 if root.stack_dim is None else root.stack_dim
    if number >= len(root.members) or behind != (noted_dim - len(root.batch_size) if noted_dim >= 0 else -1):
        return None
    if sizes == root.batch_size and all(note is None or note.position == place for place, note in enumerate(notes)):
        found: Spec = spec.memoize(
            ("member", number, names), lambda: Spec(rename_dims(root.members[number], sizes, names))
        )
        return found
    if len(given) < len(notes):
        return None
    part = _select_part(root.members[number], root.batch_size, [note.position for note in given], sizes, names)
    return None if part is None else Spec(part)


def _select_part(
    member: Node, batch_size: tuple[int, ...], positions: list[int], sizes: tuple[int, ...], names: DimNames
) -> Node | None:
    """Returns the part of a member with some of its elements; None if they were not selected dimension by dimension."""
    columns = [column.reshape(sizes) for column in np.unravel_index(positions, batch_size)]
    place = max(len(sizes) - len(batch_size), 0)  # new dimensions are in front
    if any(size > 1 for size in sizes[:place]):
        return None
    moved: list[int | None] = []
    taken: list[Sequence[int]] = []
    for left, column in zip(range(len(columns), 0, -1), columns, strict=True):
        if left > len(sizes) - place and (column == column.flat[0]).all():
            moved.append(None)
            taken.append((int(column.flat[0]),))
            continue
        along = _find_along(column, place)
        if along is None:
            return None
        moved.append(place)
        taken.append(along)
        place += 1
    return rebatch(member, len(batch_size), sizes, names, tuple(moved), tuple(taken))


def _find_along(column: NDArray[np.int64], dim: int) -> Sequence[int] | None:
    """Returns the numbers along a dimension; None if others matter too, or there is no such dimension."""
    if dim >= column.ndim:
        return None
    first = column[tuple(slice(None) if at == dim else slice(1) for at in range(column.ndim))]
    if (column != first).any():
        return None
    numbers: list[int] = first.reshape(-1).tolist()
    run = range(numbers[0], numbers[0] + len(numbers))
    return run if numbers == list(run) else tuple(numbers)


class _Other(Exception):  # noqa: N818 - control flow, not an error
    """The elements differ from the member."""


def _gather_member(structures: Sequence[Spec], parts: list[Any], around: tuple[int, ...]) -> Captured | list[Any]:
    """Joins elements by the first of these structures that fits."""
    for member in structures:
        try:
            return _join_member(member, parts, around)
        except (_Other, TDServeError):
            continue
    return parts


def _find_columns(parts: list[Any], num_members: int, batch_size: tuple[int, ...], dim: int) -> list[list[Any]] | None:
    """Returns the elements of each member; None if elements belong to different numbers of members."""
    depth = len(batch_size)
    if dim < 0:
        return [parts]
    if dim < depth:
        return group_parts(parts, batch_size, dim)
    sizes = {tuple(part.batch_size)[dim - depth : dim - depth + 1] for part in parts} or {(num_members,)}
    if len(sizes) > 1 or () in sizes:
        return None
    columns: list[list[Any]] = [[] for _ in range(*sizes.pop())]
    for part in parts:
        for column, row in zip(columns, unbind(part, dim - depth), strict=True):
            column.append(row)
    return columns


def _join_member(member: Spec, parts: list[Any], around: tuple[int, ...]) -> Captured:
    """Joins the elements of one member."""
    element = member.memoize("element", lambda: member.with_batch(len(around), ()))
    found = [capture_as(part, element) for part in parts]
    for spec in {id(each.spec): each.spec for each in found}.values():
        check_matches(element, spec, store="")
    tensors: dict[Path, torch.Tensor] = {}
    for path, leaf in member.tensors:
        dtype = to_torch(leaf.dtype)
        column = [to_indexable(each.tensors[path]) for each in found]
        joined = torch.stack(column).view(dtype) if found else torch.empty(0, dtype=dtype)
        tensors[path] = joined.view(leaf.shape)
    values: dict[Path, Any] = {}
    is_per_row: dict[Path, bool] = {}
    for path, value_leaf in member.values:
        held = [each.values[path] for each in found]
        if value_leaf.ragged == PACKED:
            held = unwrap(held)
        if value_leaf.is_unbatched:
            values[path] = _find_same(held)
            continue
        if value_leaf.ragged is None:
            given = [each.spec.values_by_path[path] for each in found]
            is_shared = not value_leaf.per_row and not any(leaf.per_row for leaf in given) and _is_one(held)
            is_per_row[path] = not is_shared
            if is_shared:
                values[path] = held[0]
                continue
            held = [
                value if leaf.per_row else repeat_value(value, leaf.batch_size)
                for value, leaf in zip(held, given, strict=True)
            ]
        values[path] = nest_list(held, around)
        if _is_torn(values[path], value_leaf):
            raise _Other
    return Captured(member.with_per_row(is_per_row), tensors, values, {})


def _is_torn(elements: Any, leaf: ValueLeaf) -> bool:
    """Returns whether no nested tensor can hold these elements, because those of one component differ in shape."""
    depth = len(leaf.batch_size)
    if leaf.ragged is None or leaf.ragged.form not in (Form.JAGGED, Form.NESTED) or depth < 2:
        return False
    return any(len({tuple(part.shape) for part in flatten_elements(row, depth - 1)}) > 1 for row in elements)


def _find_same(held: list[Any]) -> Any:
    if not _is_one(held):
        raise _Other
    return held[0]


def _is_one(held: list[Any]) -> bool:
    return bool(held) and all(is_same(value, held[0]) for value in held[1:])
