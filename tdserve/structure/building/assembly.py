"""Builds ragged leaves and packed nodes from their elements, and lazy stacks from their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    is_tensorclass,
)

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.deferred import Deferred, defer_stack, defer_values, materialise
from tdserve.structure.building.gathering import gather
from tdserve.structure.captures.captured import Captured
from tdserve.structure.stacks.elements import flatten_elements, has_notes, make_single_value, nest_list, unwrap
from tdserve.structure.stacks.restacking import build_stack, join, restack
from tdserve.structure.tensordict_private import BesideHooks, entries_of, is_value_class, set_batch_size
from tdserve.structure.tensordicts.instances import make_instance, strip_wrappers
from tdserve.structure.tensors.pieces import build_jagged, make_nested
from tdserve.structure.tensors.plain_tensors import write_in_place
from tdserve.structure.trees.nodes import DimNames, Form, Node, Path, Ragged, ValueLeaf
from tdserve.structure.trees.tree import Spec
from tdserve.values.value_codec import is_same


def build_entry(leaf: ValueLeaf, elements: Any, device: torch.device | None) -> Any:
    """Returns a ragged leaf as an entry of a tensordict.

    Args:
        leaf: Its stored form.
        elements: Nested lists over its batch size; for () the element.
        device: Device of the node around it.

    Raises:
        NotSupportedError: No tensordict can hold such elements in such a batch.
    """
    depth = len(leaf.batch_size)
    form = leaf.ragged.form if leaf.ragged is not None else Form.PACKED
    if form is Form.PACKED and isinstance(elements, Deferred):
        return defer_values(lambda: _build_entries(elements.items, leaf.batch_size, device), None)
    if form is Form.PACKED:
        return _build_entries(elements, leaf.batch_size, device)
    if leaf.ragged is None or depth == 0:
        return elements
    if form is Form.STACK:
        return _stack(elements, depth)
    if depth > 1:
        elements = _merge(elements, depth)
        leaf = _merge_leaf(leaf, leaf.ragged)
    ragged: Any = leaf.ragged
    return build_jagged(elements, ragged) if form is Form.JAGGED else make_nested(list(elements), ragged.dtype)


class PackedNode(NamedTuple):
    """A packed node, prepared to be built many times.

    Attributes:
        path: Its path.
        batch_size: Batch size of its elements.
        names: Names of these dimensions; None if none is named. The elements have names of their own.
        device: Its device.
        tensorclass: Its class, or None.
        stack_dim: As in the node.
        empty: Batch size of an element that was never written.
        members: The stacked tensordicts, as far as known.
    """

    path: Path
    batch_size: tuple[int, ...]
    names: DimNames | None
    device: torch.device | None
    tensorclass: Any
    stack_dim: int | None
    empty: tuple[int, ...]
    members: tuple[Spec, ...]

    @staticmethod
    def from_node(node: Node, path: Path, tensorclass: Any) -> PackedNode:
        """Prepares a node with ``inner``; its class was looked up."""
        device = None if node.device is None else torch.device(node.device)
        empty = tuple(max(size, 0) for size in node.inner or ())
        members = tuple(map(Spec, node.members))
        return PackedNode(path, node.batch_size, node.names, device, tensorclass, node.stack_dim, empty, members)

    def build(self, elements: Any, build_member: Callable[[Captured], Any]) -> Any:
        """Returns the tensordict of these elements, or the instance around it.

        Args:
            elements: Nested lists over its batch size; for () the element.
            build_member: Builds a member that was captured.
        """
        td = self._build_members(elements, build_member) if self._may_have_members(elements) else None
        td = self._combine(elements) if td is None else td
        return td if self.tensorclass is None else make_instance(self.tensorclass, td, {})

    def _may_have_members(self, elements: Any) -> bool:
        if self.members:
            return True
        may_have_notes = self.stack_dim is not None or len(self.batch_size) > 1
        return may_have_notes and has_notes(elements.items if isinstance(elements, Deferred) else elements)

    def _build_members(self, elements: Any, build_member: Callable[[Captured], Any]) -> Any:
        """Builds the members; None if the elements belong to others by now."""
        batch_size, dim = self.batch_size, self.stack_dim or 0
        names = self.names or (None,) * len(batch_size)
        around = [(size, name) for at, (size, name) in enumerate(zip(batch_size, names, strict=True)) if at != dim]
        sizes, own_names = zip(*around, strict=True)
        parts = gather(self.members, elements, batch_size, dim, own_names)
        if parts is None:
            return None
        rows = []
        for part in parts:
            if isinstance(part, Captured):
                rows.append(build_member(part))
            elif self.stack_dim is None:
                rows.append(_build_rows(nest_list(part, sizes), sizes, self.device, self.empty, own_names))
            else:
                rows.append(join(part, sizes, own_names))
        if dim < 0:
            return rows[0]
        if dim >= len(batch_size):  # one of the elements' own
            first = flatten_elements(elements, len(batch_size))[:1]
            names += tuple(unwrap(first[0]).names) if first else (None,) * dim
        return LazyStackedTensorDict(*rows, stack_dim=dim, stack_dim_name=names[dim])

    def _combine(self, elements: Any) -> Any:
        """Returns what the elements alone show."""
        batch_size, device, empty, names = self.batch_size, self.device, self.empty, self.names
        if self.stack_dim is not None:
            flat = flatten_elements(elements, len(batch_size))
            return restack(flat, batch_size, self.stack_dim, device, empty, names)
        if isinstance(elements, Deferred):
            return defer_stack(lambda: _build_rows(elements.items, batch_size, device, empty, names), None, 0)
        return _build_rows(elements, batch_size, device, empty, names)


class RowsWithColumns(BesideHooks):
    """Rows that differ in batch size. They cannot contain columns with one number per row, which are kept beside them.

    Attributes:
        beside: Tensors by key, ``[n]``; accessible as keys of the stack.
    """

    beside: dict[str, torch.Tensor]

    @staticmethod
    def from_rows(rows: LazyStackedTensorDict, beside: dict[str, torch.Tensor]) -> RowsWithColumns:
        """Returns the same rows with columns beside them."""
        found = RowsWithColumns.__new__(RowsWithColumns)
        found.__dict__.update(materialise(rows).__dict__)
        found.__dict__["beside"] = beside
        return found

    def find_beside(self, key: Any) -> torch.Tensor | None:
        """Returns the column of a key; None if there is none."""
        beside: dict[str, torch.Tensor] = self.__dict__.get("beside", {})
        return beside.get(key)

    def __getitem__(self, index: Any) -> Any:
        """Indexes as a lazy stack does; the columns are indexed too, unless a single row is selected."""
        found = super().__getitem__(index)
        is_rows = isinstance(index, (slice, list, torch.Tensor, np.ndarray))
        if not is_rows or not isinstance(found, LazyStackedTensorDict) or found.stack_dim:
            return found
        beside = self.__dict__.get("beside", {})
        return RowsWithColumns.from_rows(found, {key: tensor[index] for key, tensor in beside.items()})

    def make_clone(self, recurse: bool) -> Any:
        """Returns a copy, including the columns."""
        held = self.__dict__.get("beside", {})
        beside = {key: tensor.clone() if recurse else tensor for key, tensor in held.items()}
        rows = [row.clone(recurse) for row in self.tensordicts]
        return RowsWithColumns.from_rows(
            build_stack(rows, tuple(self.batch_size), self.stack_dim, self.device, self.names), beside
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Converts as a lazy stack does, including the columns."""
        held = self.__dict__.get("beside", {})
        beside = {key: tensor.to(*args, **kwargs) for key, tensor in held.items()}
        return RowsWithColumns.from_rows(super().to(*args, **kwargs), beside)


def take_columns(value: Any, dim: int) -> Any:
    """Regroups nested lists by the elements of one of their dimensions."""
    if dim == 0:
        return value
    rows = [take_columns(row, dim - 1) for row in value]
    return [list(column) for column in zip(*rows, strict=True)]


def assign(td: Any, source: Any) -> None:
    """Makes a tensordict hold what another one of the same structure holds, and nothing else.

    Dense tensors are written in place; ragged entries are replaced. Rows and elements may have any keys: those that
    ``source`` lacks are removed.

    Raises:
        NotSupportedError: An entry would have to be replaced and the destination is locked, or rows differ and it is no
            lazy stack. Nothing was written.
    """
    if not _can_hold_rows(td, source):
        reason = "no tensordict but a lazy stack holds them; give one, or leave out=None"
        raise NotSupportedError(feature="a destination that is no lazy stack, for rows that differ", reason=reason)
    for write in list(_plan_writes(td, source)):
        write()


def _plan_writes(td: Any, source: Any) -> Iterator[Callable[[], Any]]:
    """Yields the writes of ``assign``, which check nothing any more. Errors as there."""
    td, source = strip_wrappers(td), strip_wrappers(source)
    if isinstance(td, LazyStackedTensorDict):
        yield from _plan_rows(td, source.unbind(td.stack_dim), source.batch_size)
        return
    held: dict[str, Any] = entries_of(td)
    found: dict[str, Any] = dict(source.items())
    for key, new in found.items():
        old: Any = held.get(key)
        if is_tensor_collection(new) and is_tensor_collection(old) and _is_written_through(old, new):
            yield from _plan_writes(old, new)
        elif isinstance(new, torch.Tensor) and not new.is_nested and _is_place(old, new):
            yield partial(write_in_place, old.detach(), new)
        elif type(old) is type(new) is NonTensorData and is_same(old.data, new.data):
            continue
        else:
            _check_unlocked(td)
            yield partial(held.__setitem__, key, new)
    for key in held.keys() - found.keys():
        _check_unlocked(td)
        yield partial(held.__delitem__, key)


def _plan_rows(td: Any, rows: Sequence[Any], batch_size: torch.Size) -> Iterator[Callable[[], Any]]:
    """Yields the writes into the rows of a lazy stack."""
    held = td.tensordicts
    for number, (row, new) in enumerate(zip(held, rows, strict=True)):
        if _is_written_through(row, new):
            yield from _plan_writes(row, new)
        else:
            _check_unlocked(td)
            yield partial(held.__setitem__, number, new)
            yield partial(set_batch_size, td, batch_size)


def _is_written_through(old: Any, new: Any) -> bool:
    """Returns whether an object can stay, and take the content of another."""
    if isinstance(old, NonTensorStack) or is_value_class(type(old)) or is_value_class(type(new)):
        return False
    if (is_tensorclass(old) or is_tensorclass(new)) and type(old) is not type(new):
        return False
    return tuple(old.batch_size) == tuple(new.batch_size) and _can_hold_rows(old, new)


def _can_hold_rows(td: Any, source: Any) -> bool:
    """Returns whether a tensordict that stays can hold rows: where they differ, only a lazy stack can."""
    if isinstance(strip_wrappers(td), LazyStackedTensorDict):
        return True
    rows = strip_wrappers(source)
    if not isinstance(rows, LazyStackedTensorDict):
        return True
    forms = ((row.batch_size, {key: leaf.shape for key, leaf in row.items(True, True)}) for row in rows.tensordicts)
    first = next(forms, None)
    return all(form == first for form in forms)


def _is_place(old: Any, new: torch.Tensor) -> bool:
    return isinstance(old, torch.Tensor) and not old.is_nested and old.shape == new.shape and old.dtype == new.dtype


def _check_unlocked(td: Any) -> None:
    if td.is_locked:
        reason = "the destination is locked; unlock it with .unlock_(), or leave out=None"
        raise NotSupportedError(feature="replacing what is ragged", reason=reason)


def _build_rows(
    elements: Any,
    batch_size: tuple[int, ...],
    device: torch.device | None,
    empty: tuple[int, ...],
    names: Sequence[str | None] | None,
) -> Any:
    if not batch_size:
        return TensorDict({}, empty, device=device) if elements is None else unwrap(elements)
    rows = [_build_rows(row, batch_size[1:], device, empty, names and names[1:]) for row in elements]
    return build_stack(rows, (*batch_size, *empty), 0, device, names or None)


def _build_entries(elements: Any, batch_size: tuple[int, ...], device: torch.device | None) -> Any:
    if not batch_size:
        return make_single_value(None, (), device, None) if elements is None else unwrap(elements)
    rows = [_build_entries(row, batch_size[1:], device) for row in elements]
    if not rows:
        return NonTensorStack(make_single_value(None, batch_size[1:], device, None))[0:0]
    if all(is_value_class(type(row)) for row in rows):
        return NonTensorStack(*rows)
    raise NotSupportedError(feature="a stack of these entries", reason="read one row at a time")


def _merge(elements: Any, depth: int) -> list[torch.Tensor]:
    """Returns components: elements of the dimensions after the first are stacked, if they have one shape."""
    found = []
    for row in elements:
        flat = flatten_elements(row, depth - 1)
        if len({tuple(element.shape) for element in flat}) > 1:
            reason = "elements differ in shape along a batch dimension after the first; index one dimension only"
            raise NotSupportedError(feature="this nested tensor", reason=reason)
        found.append(_stack(row, depth - 1))
    return found


def _stack(row: Any, depth: int) -> torch.Tensor:
    return torch.stack([part if depth == 1 else _stack(part, depth - 1) for part in row])


def _merge_leaf(leaf: ValueLeaf, ragged: Ragged) -> ValueLeaf:
    return ValueLeaf(leaf.batch_size[:1], True, ragged._replace(shape=leaf.batch_size[1:] + ragged.shape))
