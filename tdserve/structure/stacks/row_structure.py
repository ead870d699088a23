"""The structure of single elements, stored if an element's tensordict differs from what its packed node describes.

A packed node describes what was stacked in it when it was made. Elements written later may come from members with other
parameters, locks or nested tensors. Such an element has a note of its member's structure, and of its place in it. This
module also decides whether a member needs such notes. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure import codec
from tdserve.structure.changes import rebatch, set_locks
from tdserve.structure.nodes import DimNames, Node, Path, TensorLeaf, ValueLeaf, is_marked
from tdserve.structure.tree import Spec


class Note(NamedTuple):
    """The note of one element.

    Attributes:
        spec: Its root is a packed node over the elements that were written together, without entries. ``members`` are
            the tensordicts that they came from: a single one with the ``stack_dim`` -1, else those of which each
            element has a row.
        position: Of this element among them, in C order.
    """

    spec: Spec
    position: int


def make_spec(members: Sequence[Node], batch_size: tuple[int, ...], dim: int = -1) -> Spec:
    """Returns the spec for notes of elements with these members.

    Args:
        members: Each without the dimension along which they are stacked.
        batch_size: Of the elements, at least one dimension, none of them 0.
        dim: Dimension along which members are stacked, after those of ``batch_size``; -1: there is a single one.
    """
    inner = members[0].shown_batch_size[len(batch_size) :]
    if dim >= 0:
        behind = dim - len(batch_size)
        inner = (*inner[:behind], -1, *inner[behind:])
    nameless = (None,) * len(batch_size)  # a reader has other dimensions around
    kept = tuple(_rename_dims(member, batch_size, nameless) for member in members)
    return Spec(Node(batch_size, None, None, None, (), stack_dim=dim, inner=inner, members=kept))


def find_structure(
    notes: Sequence[Note | None], sizes: tuple[int, ...], names: DimNames, *, number: int = 0, behind: int = -1
) -> Spec | None:
    """Returns the structure of the member that elements belong to; None if they disagree, or have no notes.

    An element that was written into a member on its own has no note, and need not have changed its structure.

    Args:
        notes: Of the elements of one member, in C order.
        sizes: Of the dimensions that number them.
        names: Of these dimensions.
        number: Of the member.
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
            ("member", number, names), lambda: Spec(_rename_dims(root.members[number], sizes, names))
        )
        return found
    if len(given) < len(notes):
        return None
    part = _select_part(root.members[number], root.batch_size, [note.position for note in given], sizes, names)
    return None if part is None else Spec(part)


def read_note(position: int, content: bytes) -> Note:
    """Decodes the note of an element; elements with equal notes get the same structure.

    Raises:
        RemoteProtocolError: The content is no note.
    """
    spec = codec.from_content(content)
    root = spec.root
    is_around = root.stack_dim is not None and 0 <= root.stack_dim < len(root.batch_size)
    is_in = type(position) is int and 0 <= position < math.prod(spec.batch_size)
    if not root.members or not root.batch_size or is_around or not is_in:
        raise RemoteProtocolError(expected="what an element was written with", received="something else")
    return Note(spec, position)


def _rename_dims(member: Node, batch_size: tuple[int, ...], names: DimNames) -> Node:
    """Returns a member with other names of its dimensions."""
    every = tuple(range(len(batch_size)))
    return rebatch(member, len(every), batch_size, names, every, tuple(map(range, batch_size)), is_whole=True)


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


def needs_note(members: Sequence[Node], batch_size: tuple[int, ...], *, is_locked: bool) -> bool:
    """Returns whether a stack would be rebuilt differently from its elements alone.

    Args:
        members: What is stacked.
        batch_size: Of the elements.
        is_locked: Whether the stack is locked as a whole.
    """
    return 0 in batch_size or not all(_is_implied(member, is_locked=is_locked) for member in members)


def is_same(known: Sequence[Node], actual: Sequence[Node], *, is_locked: bool) -> bool:
    """Returns whether members equal the known ones, except for devices, names and order.

    Args:
        is_locked: Whether the written tensordict is locked as a whole; then the locks of its members do not count.
    """
    if is_locked:
        known = [set_locks(member, False) for member in known]
    return [*map(_strip_node, known)] == [*map(_strip_node, actual)]


def num_levels(node: Node) -> int:
    """Counts the levels of nested nodes, including this one; members count as nested."""
    below = [num_levels(entry) for _, entry in node.entries if isinstance(entry, Node) and node.inner is None]
    return 1 + max([*below, *map(num_levels, node.members)], default=0)


def find_shared_values(member: Node) -> Iterator[Path]:
    """Yields the paths where a member has one value for all of its elements: a member without elements loses these."""
    for path, leaf in Spec(member).values:
        if not leaf.per_row and leaf.batch_size:
            yield path


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
