"""Records what was stacked in a packed node, if its elements alone do not restore it.

A packed node describes what was stacked in it when it was made (``Node.members``). Elements written later may come from
members with other parameters, locks or nested tensors. Such an element has a note of its member's structure, and of its
place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from tdserve.structure.stacks.elements import Note, flatten_elements, is_by_rows, nest_list, unbind
from tdserve.structure.stacks.restacking import group_parts
from tdserve.structure.trees.changes import move_to_cpu, rename_dims, set_locks
from tdserve.structure.trees.nodes import Node, Path, TensorLeaf, ValueLeaf, is_marked
from tdserve.structure.trees.tree import Spec

Look = Callable[[Any, tuple[int, ...]], Node]
"""Captures a member by itself; the dimensions that number its elements are given."""


def is_note_needed(members: Sequence[Node], batch_size: tuple[int, ...], *, is_locked: bool) -> bool:
    """Returns whether a stack would be rebuilt differently from its elements alone.

    Args:
        members: What is stacked.
        batch_size: Batch size of the elements.
        is_locked: Whether the stack is locked as a whole.
    """
    return 0 in batch_size or not all(_is_implied(member, is_locked=is_locked) for member in members)


def annotate(td: Any, elements: Any, wanted: Node, *, look: Look, is_locked: bool) -> Any:
    """Annotates elements with their member's structure if it cannot be derived from them.

    Returns None if there is no element to annotate, and the node describes other members.

    Args:
        td: The tensordict that consists of these elements.
        elements: Nested lists over the batch size of the node.
        wanted: The node that they are written into; has a batch dimension.
        look: Captures a member.
        is_locked: Whether the written tensordict is locked as a whole, which no part of it shows.
    """
    batch_size = wanted.batch_size
    depth = len(batch_size)
    dim = 0 if wanted.stack_dim is None and depth > 1 else wanted.stack_dim
    if dim is None or dim >= len(td.batch_size):
        return elements
    around = batch_size[:dim] + batch_size[dim + 1 :] if dim >= 0 else batch_size
    members: Sequence[Any] = [td] if dim < 0 else unbind(td, dim)
    others: Iterable[int] = range(len(members))
    if wanted.stack_dim is None:
        others = [number for number in others if not is_by_rows(members[number], len(around))]
    nodes = {number: move_to_cpu(look(members[number], around)) for number in others}
    if is_locked:
        nodes = {number: set_locks(node, False) for number, node in nodes.items()}
    if 0 in batch_size:
        is_known = len(wanted.members) != len(nodes) or is_same(wanted.members, [*nodes.values()], is_locked=is_locked)
        return elements if is_known else None
    if wanted.stack_dim is not None and not wanted.members:
        others = [number for number, node in nodes.items() if is_note_needed([node], batch_size, is_locked=False)]
    flat = flatten_elements(elements, depth)
    if 0 <= dim < depth:
        groups = group_parts(range(len(flat)), batch_size, dim)
        for number in others:
            _add_notes(flat, groups[number], make_spec([nodes[number]], around))
    elif others:
        _add_notes(flat, range(len(flat)), make_spec([*nodes.values()], batch_size, dim))
    return nest_list(flat, batch_size)


def make_spec(members: Sequence[Node], batch_size: tuple[int, ...], dim: int = -1) -> Spec:
    """Returns the spec for notes of elements with these members.

    Args:
        members: Each without the dimension along which they are stacked.
        batch_size: Batch size of the elements, at least one dimension, none of them 0.
        dim: Dimension along which members are stacked, after those of ``batch_size``; -1: there is a single one.
    """
    inner = members[0].shown_batch_size[len(batch_size) :]
    if dim >= 0:
        behind = dim - len(batch_size)
        inner = (*inner[:behind], -1, *inner[behind:])
    nameless = (None,) * len(batch_size)  # a reader has other dimensions around
    kept = tuple(rename_dims(member, batch_size, nameless) for member in members)
    return Spec(Node(batch_size, None, None, None, (), stack_dim=dim, inner=inner, members=kept))


def count_levels(node: Node) -> int:
    """Counts the levels of nested nodes, including this one; members count as nested."""
    below = [count_levels(entry) for _, entry in node.entries if isinstance(entry, Node) and node.inner is None]
    return 1 + max([*below, *map(count_levels, node.members)], default=0)


def find_shared_values(member: Node) -> Iterator[Path]:
    """Yields the paths where a member has one value for all of its elements: a member without elements loses these."""
    for path, leaf in Spec(member).values:
        if not leaf.per_row and leaf.batch_size:
            yield path


def _add_notes(flat: list[Any], places: Sequence[int], spec: Spec) -> None:
    """Adds a note with this structure to the elements at some positions, which are those of a member, in order."""
    for position, place in enumerate(places):
        flat[place] = flat[place]._replace(note=Note(spec, position))


def is_same(known: Sequence[Node], actual: Sequence[Node], *, is_locked: bool) -> bool:
    """Returns whether members equal the known ones, except for devices, names and order.

    Args:
        is_locked: Whether the written tensordict is locked as a whole; then the locks of its members do not count.
    """
    if is_locked:
        known = [set_locks(member, False) for member in known]
    return [*map(_strip_node, known)] == [*map(_strip_node, actual)]


def _strip_node(node: Node) -> Node:
    """Returns a tree without devices, names and order."""
    entries = [(key, _strip_node(entry) if isinstance(entry, Node) else entry) for key, entry in node.entries]
    entries.sort(key=itemgetter(0))
    return node._replace(names=None, device=None, entries=tuple(entries), members=tuple(map(_strip_node, node.members)))


def _is_implied(node: Node, *, is_locked: bool) -> bool:
    """Returns whether elements of a node with equal structures show everything about it."""
    if node.stack_dim is not None or node.inner is not None or node.params is not None:
        return False
    if node.is_locked and not is_locked:
        return False
    return all(
        _is_implied(entry, is_locked=is_locked) if isinstance(entry, Node) else _is_leaf_implied(entry)
        for _, entry in node.entries
    )


def _is_leaf_implied(leaf: TensorLeaf | ValueLeaf) -> bool:
    return not is_marked(leaf) and (isinstance(leaf, TensorLeaf) or not (leaf.per_row or leaf.ragged))
