"""Changes of every node and leaf of a tree: batch dimensions, device, values per row. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tdserve.structure.trees.nodes import (
    DimNames,
    Entry,
    Node,
    Path,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
    find_packed_stack_dim,
)

Leaf = TensorLeaf | ValueLeaf


def rebatch(
    node: Node,
    num_dims: int,
    batch_size: tuple[int, ...],
    names: DimNames | None,
    moved: tuple[int | None, ...] | None = None,
    taken: tuple[Sequence[int], ...] | None = None,
    *,
    is_whole: bool = False,
) -> Node:
    """Returns the tree with its first ``num_dims`` batch dimensions replaced; arguments as in ``Spec.with_batch``.

    ``is_whole``: they are replaced by the same ones, so that the state besides content stays too.
    """
    entries: list[tuple[str, Entry]] = []
    for key, entry in node.entries:
        if isinstance(entry, TensorLeaf):
            shape = batch_size + entry.shape[num_dims:]
            kind = entry.kind if is_whole else TensorKind.PLAIN
            entries.append((key, TensorLeaf(entry.dtype, shape, kind, entry.requires_grad)))
        elif isinstance(entry, ValueLeaf):
            own = batch_size + entry.batch_size[num_dims:]
            is_per_row = entry.per_row if entry.ragged is None else bool(own)
            entries.append((key, entry._replace(batch_size=own, per_row=is_per_row)))
        else:
            entries.append((key, rebatch(entry, num_dims, batch_size, names, moved, taken, is_whole=is_whole)))
    stack_dim = node.stack_dim
    if node.inner is None:
        stack_dim = _restack(stack_dim, num_dims, len(batch_size), moved)
    elif stack_dim is not None:
        stack_dim = _restack_packed(node, stack_dim, num_dims, len(batch_size), moved)
    members: tuple[Node, ...] = ()
    if stack_dim is not None:
        members = _rebatch_members(node, num_dims, batch_size, names, moved, taken, is_whole)
    return node._replace(
        batch_size=batch_size + node.batch_size[num_dims:],
        names=_rename(node.names, num_dims, len(node.batch_size), len(batch_size), names),
        entries=tuple(entries),
        stack_dim=stack_dim,
        is_locked=is_whole and node.is_locked,
        params=node.params if is_whole else None,
        members=members,
    )


def rename_dims(node: Node, batch_size: tuple[int, ...], names: DimNames) -> Node:
    """Returns the tree with other names of its first dimensions, which have these sizes."""
    every = tuple(range(len(batch_size)))
    return rebatch(node, len(every), batch_size, names, every, tuple(map(range, batch_size)), is_whole=True)


def _rebatch_members(
    node: Node,
    num_dims: int,
    batch_size: tuple[int, ...],
    names: DimNames | None,
    moved: tuple[int | None, ...] | None,
    taken: tuple[Sequence[int], ...] | None,
    is_whole: bool,
) -> tuple[Node, ...]:
    """Returns the members of a packed node whose dimensions are replaced.

    None if it is unknown which of them remain.
    """
    at = node.stack_dim
    if not node.members or at is None:
        return ()
    members = node.members
    if 0 <= at < num_dims:
        if moved is None or taken is None:
            return ()
        place = moved[at]
        members = tuple(members[number] for number in taken[at])
        if place is not None:
            batch_size = batch_size[:place] + batch_size[place + 1 :]
            names = None if names is None else names[:place] + names[place + 1 :]
            moved = tuple(dim if dim is None or dim < place else dim - 1 for dim in moved)
        moved, taken = moved[:at] + moved[at + 1 :], taken[:at] + taken[at + 1 :]
        num_dims -= 1
        rest = node.batch_size[:at] + node.batch_size[at + 1 : num_dims + 1]
        is_whole = moved == (*range(num_dims),) and list(taken) == [*map(range, rest)]
    return tuple(rebatch(member, num_dims, batch_size, names, moved, taken, is_whole=is_whole) for member in members)


def _restack(stack_dim: int | None, num_old: int, num_new: int, moved: tuple[int | None, ...] | None) -> int | None:
    """Returns the new stacking dimension after first dimensions were replaced; None if it is no lazy stack any more."""
    if stack_dim == -1:
        return 0 if num_new else -1
    if stack_dim is None or stack_dim >= num_old:
        return None if stack_dim is None else stack_dim + num_new - num_old
    if moved is not None:
        return moved[stack_dim]
    return min(stack_dim, num_new - 1) if num_new else None


def _restack_packed(
    node: Node, stack_dim: int, num_old: int, num_new: int, moved: tuple[int | None, ...] | None
) -> int | None:
    """Returns the new stacking dimension of a packed node; what was one row of a stack is dense."""
    found = -1 if stack_dim < 0 else _restack(stack_dim, num_old, num_new, moved)
    return find_packed_stack_dim(-1 if found is None else found, len(node.batch_size) - num_old + num_new)


def _rename(old: DimNames | None, num_dims: int, num_old: int, num_new: int, names: DimNames | None) -> DimNames | None:
    everything = old if old is not None else (None,) * num_old
    if names is None:
        names = everything[:num_dims] if num_new == num_dims else (None,) * num_new
    renamed = names + everything[num_dims:]
    return renamed if any(name is not None for name in renamed) else None


def map_tree(
    node: Node,
    on_node: Callable[[Node], Node],
    on_leaf: Callable[[Leaf], Leaf] | None = None,
    *,
    has_members: bool = True,
) -> Node:
    """Returns the tree with every node and leaf changed; nodes after what is below them.

    Args:
        node: The root.
        on_node: Changes a node.
        on_leaf: Changes a leaf; None leaves it as it is.
        has_members: Whether members are changed too.
    """

    def change(entry: Any) -> Any:
        if isinstance(entry, Node):
            return map_tree(entry, on_node, on_leaf, has_members=has_members)
        return entry if on_leaf is None else on_leaf(entry)

    entries = tuple([(key, change(entry)) for key, entry in node.entries])
    members = tuple(map(change, node.members)) if has_members else node.members
    return on_node(node._replace(entries=entries, members=members))


def redevice(node: Node, device: str | None) -> Node:
    """Returns the tree with every node on a device, or on none."""
    return map_tree(node, lambda each: each._replace(device=device))


def move_to_cpu(node: Node) -> Node:
    """Returns the tree with the CPU as the device of every node that has one."""
    return map_tree(node, lambda each: each._replace(device=each.device and "cpu"))


def set_locks(node: Node, is_locked: bool) -> Node:
    """Returns the tree with every node locked, or none."""

    def lock(each: Node) -> Node:
        params = each.params
        if params is not None:
            params = params._replace(is_content_locked=is_locked or params.locks_content)
        return each._replace(is_locked=is_locked, params=params)

    return map_tree(node, lock)


def strip_to_content(node: Node) -> Node:
    """Returns the tree without anything besides content.

    Members of packed nodes keep it, because it is needed to rebuild them.
    """

    def strip(leaf: Leaf) -> Leaf:
        if isinstance(leaf, TensorLeaf):
            return TensorLeaf(leaf.dtype, leaf.shape)
        return leaf._replace(requires_grad=False)

    return map_tree(node, lambda each: each._replace(is_locked=False, params=None), strip, has_members=False)


def set_per_row(node: Node) -> Node:
    """Returns the tree with one value per row in every leaf of values with rows."""

    def spread(leaf: Leaf) -> Leaf:
        if isinstance(leaf, TensorLeaf):
            return leaf
        return leaf._replace(per_row=bool(leaf.batch_size) and not leaf.is_unbatched)

    return map_tree(node, lambda each: each, spread, has_members=False)


def replace_entries(node: Node, changed: Mapping[Path, Entry], path: Path = ()) -> Node:
    """Returns the tree with other entries at some paths."""
    entries: list[tuple[str, Entry]] = []
    for key, entry in node.entries:
        below = (*path, key)
        if below in changed:
            entry = changed[below]
        elif isinstance(entry, Node):
            entry = replace_entries(entry, changed, below)
        entries.append((key, entry))
    return node._replace(entries=tuple(entries))


def drop_batch_dim(node: Node, dim: int) -> Node:
    """Returns the tree without a batch dimension: one row of a lazy stack."""

    def drop_size(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:dim] + sizes[dim + 1 :]

    entries: list[tuple[str, Entry]] = []
    for key, entry in node.entries:
        if isinstance(entry, TensorLeaf):
            entry = entry._replace(shape=drop_size(entry.shape))
        elif isinstance(entry, ValueLeaf):
            batch_size = drop_size(entry.batch_size)
            entry = entry._replace(batch_size=batch_size, per_row=entry.per_row and bool(batch_size))
        else:
            entry = drop_batch_dim(entry, dim)
        entries.append((key, entry))
    names = None if node.names is None else node.names[:dim] + node.names[dim + 1 :]
    stack_dim = node.stack_dim
    members: tuple[Node, ...] = ()
    if stack_dim is not None and node.inner is not None:
        left = -1 if stack_dim == dim else stack_dim - (stack_dim > dim)
        if stack_dim != dim:
            members = tuple(drop_batch_dim(member, dim - (0 <= stack_dim < dim)) for member in node.members)
        stack_dim = find_packed_stack_dim(left, len(node.batch_size) - 1)
    elif stack_dim is not None:
        stack_dim = None if stack_dim == dim else stack_dim - (stack_dim > dim)
    return node._replace(
        batch_size=drop_size(node.batch_size),
        names=names if names is not None and any(name is not None for name in names) else None,
        entries=tuple(entries),
        stack_dim=stack_dim,
        members=() if stack_dim is None else members,
    )
