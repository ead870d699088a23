"""Annotates elements with the structure of their member, when a packed node may describe another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tdserve.structure.changes import move_to_cpu, set_locks
from tdserve.structure.nodes import Node
from tdserve.structure.stacks.elements import flatten_elements, is_by_rows, nest_list, unbind
from tdserve.structure.stacks.restacking import group_parts
from tdserve.structure.stacks.row_structure import Note, is_same, make_spec, needs_note
from tdserve.structure.tree import Spec

Look = Callable[[Any, tuple[int, ...]], Node]
"""Captures a member by itself; the dimensions that number its elements are given."""


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
        others = [number for number, node in nodes.items() if needs_note([node], batch_size, is_locked=False)]
    flat = flatten_elements(elements, depth)
    if 0 <= dim < depth:
        groups = group_parts(range(len(flat)), batch_size, dim)
        for number in others:
            _note(flat, groups[number], make_spec([nodes[number]], around))
    elif others:
        _note(flat, range(len(flat)), make_spec([*nodes.values()], batch_size, dim))
    return nest_list(flat, batch_size)


def _note(flat: list[Any], places: Sequence[int], spec: Spec) -> None:
    """Adds a note with this structure to the elements at some positions, which are those of a member, in order."""
    for position, place in enumerate(places):
        flat[place] = flat[place]._replace(note=Note(spec, position))
