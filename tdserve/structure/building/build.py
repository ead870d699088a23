"""Builds a tensordict or tensorclass instance from a spec, tensors and values; the reverse of ``capture``.

This is on the hot path of every read, so it uses tensordict's unchecked constructors: the spec was checked when
decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from tdserve.base.errors import LocalProtocolError, NotSupportedError, SpecMismatchError
from tdserve.structure.building.assembly import PackedNode, RowsWithColumns, assign, build_entry, take_columns
from tdserve.structure.building.deferred import MIN_ROWS, Deferred, defer_stack, defer_values
from tdserve.structure.captures import unbatched
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import Captured
from tdserve.structure.stacks.elements import (
    OneValue,
    flatten_elements,
    make_single_value,
)
from tdserve.structure.stacks.restacking import build_stack
from tdserve.structure.tensordict_private import entries_of, get_fields, names_of, new_tensordict
from tdserve.structure.tensordicts.instances import count_classes, find_content, find_shown_class, make_instance
from tdserve.structure.tensordicts.live_values import LiveEntry
from tdserve.structure.tensordicts.state import restore_state
from tdserve.structure.tensors.plain_tensors import write_in_place
from tdserve.structure.trees.changes import drop_batch_dim
from tdserve.structure.trees.nodes import Node, Path, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec, check_matches, iter_leaves, quote, show
from tdserve.values.value_codec import is_same


class _Recipe(NamedTuple):
    """A node, prepared to be built many times.

    Attributes:
        steps: Key, path, and at most one of: the non-tensor leaf, the recipe of a child. Neither: a tensor.
        num_classes: Types that tensordict had registered when the tensorclasses in the node were looked up; 0 without
            any. A class that is defined again later (as in a notebook) is then looked up again. -1 if a class was not
            found: it is looked up each time.
        packed: The packed node, if it is one.
        row: For a lazy stack, the recipe of one row.
        stack_dim: Dimension of a lazy stack.
        columns: For a lazy stack, its leaves, tensors before values.
        state: For the root, its node if it records anything besides content.
    """

    batch_size: torch.Size
    names: Any
    device: torch.device | None
    tensorclass: Any
    steps: tuple[tuple[str, Path, ValueLeaf | None, _Recipe | None], ...]
    num_classes: int
    packed: PackedNode | None = None
    row: _Recipe | None = None
    stack_dim: int = 0
    columns: tuple[tuple[Path, TensorLeaf | ValueLeaf], ...] = ()
    state: Node | None = None


def build(spec: Spec, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> Any:
    """Builds a tensordict (or an instance of the root's tensorclass); copies nothing.

    ``__post_init__`` of tensorclasses does not run, as in unpickling: it ran before the capture.

    Args:
        spec: The structure.
        tensors: Every tensor leaf, with the dtype and shape of the spec; not checked here.
        values: Every non-tensor leaf, as returned by ``capture``.

    Raises:
        NotSupportedError: A tensorclass of the spec is unknown in this process; the error names the module to import.
        LocalProtocolError: A leaf is missing, which is a bug of the caller.
    """
    recipe = spec.memo.get(_Recipe)
    if recipe is None or recipe.num_classes not in (0, count_classes()):
        recipe = spec.memo[_Recipe] = _prepare(spec.root, ())._replace(state=spec.root if spec.has_state else None)
    try:
        found = _build(recipe, tensors, values)
    except KeyError as error:
        raise LocalProtocolError(reason=f"no content was given for the leaf {error}") from None
    return found if recipe.state is None else restore_state(found, recipe.state)


def fill(td: Any, spec: Spec, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> None:
    """Copies content into an existing tensordict in place.

    Args:
        td: Destination; its structure must match, devices and names of dimensions may differ. A locked one is filled
            too, unless a non-tensor value would change. Live entries keep their value in its place.
        spec: The structure of the content.
        tensors: Every tensor leaf of the spec.
        values: Every non-tensor leaf of the spec.

    Raises:
        SpecMismatchError: The destination, or a tensor, does not fit. Nothing was written.
        NotSupportedError: The destination cannot be written. Nothing was written.
    """
    target = capture(td, is_destination=True, like=spec)
    check_matches(spec, target.spec, store="")
    if spec.has_ragged or target.spec.has_ragged:  # the capture of a lazy stack has copies of its members' tensors
        if not spec.has_ragged and td.is_locked:
            _check_values(spec, target, values)
        assign(td, build(spec, tensors, values))
        return
    is_per_row = {path: leaf.per_row for path, leaf in target.spec.values}
    slots = [
        (_find_slot(td, path), leaf, path)
        for path, leaf in spec.values
        if leaf.per_row != is_per_row[path] or not is_same(target.values[path], values[path])
    ]
    for path, tensor_leaf in spec.tensors:
        shape = tuple(tensors[path].shape)
        if shape != tensor_leaf.shape:
            raise SpecMismatchError(key=show(path), expected=str(list(tensor_leaf.shape)), actual=str(list(shape)))
    for path, destination in target.tensors.items():
        write_in_place(destination, tensors[path])
    for (owner, beside), leaf, path in slots:
        if path[-1] in beside:
            beside[path[-1]] = values[path]
        elif not isinstance(entries_of(owner)[path[-1]], LiveEntry):
            entries_of(owner)[path[-1]] = _build_value(leaf, values[path], owner.device, names_of(owner))


def _check_values(spec: Spec, target: Captured, values: Mapping[Path, Any]) -> None:
    """Raises NotSupportedError if a value would have to be replaced in a locked destination with lazy stacks."""
    for path, leaf in spec.values:
        held, per_row = target.values[path], dict(target.spec.values)[path].per_row
        if not is_same(held, values[path]) and (
            leaf.per_row
            or not per_row
            or any(not is_same(value, values[path]) for value in flatten_elements(held, len(leaf.batch_size)))
        ):
            raise _make_lock_error(path)


def _make_lock_error(path: Path) -> NotSupportedError:
    reason = "the destination is locked; unlock it with .unlock_(), or leave out=None"
    return NotSupportedError(feature=f"replacing the non-tensor value at key {quote(path)}", reason=reason)


def _find_slot(td: Any, path: Path) -> tuple[TensorDict, dict[str, Any]]:
    """Returns the tensordict that holds a non-tensor leaf, and the fields beside it if a tensorclass is around it."""
    for depth in range(len(path)):
        beside: dict[str, Any] = {}
        while type(td) is not TensorDict:
            beside = beside or get_fields(td)
            td = find_content(td)
        if depth < len(path) - 1:
            td = entries_of(td)[path[depth]]
    if td.is_locked and not isinstance(entries_of(td).get(path[-1]), LiveEntry):
        raise _make_lock_error(path)
    return td, beside


def _prepare(node: Node, path: Path) -> _Recipe:
    tensorclass = None
    if node.tensorclass is not None:
        keys = frozenset() if node.inner is not None else frozenset(key for key, _ in node.entries)
        tensorclass = find_shown_class(node.tensorclass, path, keys)
    steps: list[tuple[str, Path, ValueLeaf | None, _Recipe | None]] = []
    stack_dim = None if node.stack_dim == -1 or node.inner is not None else node.stack_dim
    for key, entry in node.entries if stack_dim is None else ():
        child_path = (*path, key)
        if node.inner is not None:
            if isinstance(entry, TensorLeaf):  # elements of packed nodes have none here
                steps.append((key, child_path, None, None))
        elif isinstance(entry, Node):
            steps.append((key, child_path, None, _prepare(entry, child_path)))
        elif isinstance(entry, TensorLeaf):
            steps.append((key, child_path, None, None))
        else:
            steps.append((key, child_path, entry, None))
    row = None if stack_dim is None else _prepare(drop_batch_dim(node, stack_dim)._replace(tensorclass=None), path)
    below = [child.num_classes for *_, child in steps if child] + ([] if row is None else [row.num_classes])
    is_unknown = (node.tensorclass is not None and tensorclass is None) or -1 in below
    has_classes = tensorclass is not None or any(below)
    return _Recipe(
        torch.Size(node.batch_size),
        None if node.names is None else list(node.names),
        None if node.device is None else torch.device(node.device),
        tensorclass,
        tuple(steps),
        -1 if is_unknown else count_classes() if has_classes else 0,
        None if node.inner is None else PackedNode.from_node(node, path, tensorclass),
        row,
        stack_dim or 0,
        () if stack_dim is None else tuple(iter_leaves(node, path)),
    )


def _build(recipe: _Recipe, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> Any:
    batch_size, names, device, tensorclass, steps, _, packed, row, *_ = recipe
    if packed is not None:
        found = packed.build(values[packed.path], _build_captured)
        beside = {key: tensors[path] for key, path, _, _ in steps}
        return RowsWithColumns.from_rows(found, beside) if beside else found
    if row is not None:
        return _build_stack(recipe, row, tensors, values)
    source: Any = {}
    for key, path, leaf, child in steps:
        if child is not None:
            source[key] = _build(child, tensors, values)
        elif leaf is None:
            source[key] = tensors[path]
        else:
            source[key] = _build_value(leaf, values[path], device, names)
    # The tensordict keeps the list; if all shared it, renaming dimensions of one would rename those of the others.
    td = new_tensordict(
        source, batch_size=batch_size, device=device, names=None if names is None else names.copy(), nested=False
    )
    return td if tensorclass is None else make_instance(tensorclass, td, {})


def _build_captured(captured: Captured) -> Any:
    return build(captured.spec, captured.tensors, captured.values)


def _build_stack(
    recipe: _Recipe, row: _Recipe, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]
) -> Any:
    """Builds a lazy stack, row by row."""
    dim = recipe.stack_dim
    num_rows = recipe.batch_size[dim]
    if num_rows >= MIN_ROWS:
        td = defer_stack(lambda: _stack(recipe, row, tensors, values), recipe.batch_size, dim)
    else:
        td = _stack(recipe, row, tensors, values)
    return td if recipe.tensorclass is None else make_instance(recipe.tensorclass, td, {})


def _stack(
    recipe: _Recipe, row: _Recipe, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]
) -> LazyStackedTensorDict:
    dim = recipe.stack_dim
    num_rows = recipe.batch_size[dim]
    columns: dict[Path, Any] = {}
    for path, leaf in recipe.columns:
        if isinstance(leaf, TensorLeaf):
            columns[path] = tensors[path].unbind(dim)
        else:
            columns[path] = take_columns(values[path], dim) if leaf.per_row else [values[path]] * num_rows
    rows = []
    for number in range(num_rows):
        content = {path: column[number] for path, column in columns.items()}
        rows.append(_build(row, content, content))
    return build_stack(rows, recipe.batch_size, dim, recipe.device, recipe.names)


def _build_value(leaf: ValueLeaf, value: Any, device: torch.device | None, names: Any) -> Any:
    if leaf.is_unbatched:
        return unbatched.from_value(
            unbatched.find_shared_value(value, leaf) if leaf.per_row else value, leaf.batch_size
        )
    if leaf.ragged is not None:
        return build_entry(leaf, value, device)
    own_names = None if names is None else names + [None] * (len(leaf.batch_size) - len(names))
    if leaf.per_row and isinstance(value, Deferred):
        batch_size = torch.Size(leaf.batch_size)
        known = value if len(batch_size) == 1 else None
        return defer_values(lambda: _split_rows(value.items, leaf.batch_size, device, own_names), batch_size, known)
    return (
        _split_rows(value, leaf.batch_size, device, own_names)
        if leaf.per_row
        else make_single_value(value, leaf.batch_size, device, own_names)
    )


def _split_rows(value: Any, batch_size: tuple[int, ...], device: torch.device | None, names: Any) -> Any:
    if not batch_size:
        return make_single_value(value, (), device, None)
    if type(value) is OneValue:
        return make_single_value(value.value, batch_size, device, names)
    inner_names = None if names is None else names[1:]
    if batch_size[0] == 0:  # tensordict makes empty stacks by indexing only
        return NonTensorStack(make_single_value(None, batch_size[1:], device, None))[0:0]
    rows = [_split_rows(row, batch_size[1:], device, inner_names) for row in value]
    return NonTensorStack(*rows, stack_dim=0, stack_dim_name=None if names is None else names[0])
