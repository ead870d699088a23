"""Annotates elements with the structure of their member, where their packed node does not imply it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tdserve.base.errors import TDServeError
from tdserve.structure.changes import moved_to_cpu, relocked
from tdserve.structure.nodes import Node
from tdserve.structure.stacks.elements import flat_elements, has_notes, is_by_rows, nested_list, unbind
from tdserve.structure.stacks.restacking import groups_of
from tdserve.structure.stacks.row_structure import Note, is_alike, needs_note, spec_of
from tdserve.structure.tree import Spec

Look = Callable[[Any, tuple[int, ...]], Node]
"""What a member is, by itself; its dimensions that number elements are given."""

Compare = Callable[[Any, Spec], tuple[Node, list[Any]]]
"""What a member is where it is taken apart for another structure, and its values."""


def annotate(td: Any, elements: Any, wanted: Node, *, look: Look, compare: Compare, is_locked: bool) -> Any:
    """Annotates elements with their member's structure where the node does not imply it; None if there is no element to
    annotate.

    Args:
        td: What they are the elements of.
        elements: Nested lists over the batch size of the node.
        wanted: The node that they are written into; has a batch dimension.
        is_locked: Whether what is written is locked as a whole, which is nothing that a part tells.
    """
    batch_size = wanted.batch_size
    depth = len(batch_size)
    dim = 0 if wanted.stack_dim is None and depth > 1 else wanted.stack_dim
    if dim is None or dim >= len(td.batch_size):
        return elements
    members: Sequence[Any] = [td] if dim < 0 else unbind(td, dim)
    around = batch_size[:dim] + batch_size[dim + 1 :] if dim >= 0 else batch_size
    known = wanted.members if len(wanted.members) == len(members) else ()

    def node_of(member: Any) -> Node:
        node = moved_to_cpu(look(member, around))
        return relocked(node, False) if is_locked else node

    def is_told(number: int, member: Any) -> bool:
        if wanted.stack_dim is None:
            return is_by_rows(member, len(around))
        if not known:
            return not needs_note([node_of(member)], batch_size, is_locked=False)
        return _is_as_known(member, known[number], compare, is_locked)

    others = [number for number, member in enumerate(members) if not is_told(number, member)]
    if not others or (0 in batch_size and not known):
        return elements
    if 0 in batch_size:
        return None
    flat = flat_elements(elements, depth)
    if 0 <= dim < depth:
        groups = groups_of(range(len(flat)), batch_size, dim)
        for number in others:
            _note(flat, groups[number], spec_of([node_of(members[number])], around))
    else:
        _note(flat, range(len(flat)), spec_of([node_of(member) for member in members], batch_size, dim))
    return nested_list(flat, batch_size)


def _is_as_known(member: Any, known: Node, compare: Compare, is_locked: bool) -> bool:
    """Whether the node tells what a member is."""
    try:
        actual, values = compare(member, Spec(known))
    except TDServeError:
        return False
    if is_locked:
        known, actual = relocked(known, False), relocked(actual, False)
    return is_alike(known, actual) and not any(map(has_notes, values))


def _note(flat: list[Any], places: Sequence[int], spec: Spec) -> None:
    """Lets the elements at some places, which are those of a member in their order, tell it."""
    for position, place in enumerate(places):
        flat[place] = flat[place]._replace(note=Note(spec, position))
