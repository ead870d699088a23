from __future__ import annotations

import itertools
from typing import Any

import pytest
from tensordict import TensorDict

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure.building.gathering import find_structure
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.stacks.annotation import make_spec
from tdserve.structure.stacks.elements import Note
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import Form, Node, Ragged, TensorKind, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

JAGGED = ValueLeaf((2, 3), True, Ragged(Form.JAGGED, "int8", (-1,)))
PARAMETER = TensorLeaf("float32", (2, 3, 4), TensorKind.PARAMETER, True)
MEMBER = Node((2, 3), None, None, None, (("p", PARAMETER), ("t", JAGGED)), is_locked=True)
SPEC = make_spec([MEMBER], (2, 3))
WHOLE = [Note(SPEC, position) for position in range(6)]
NAMELESS = (None, None)
AROUND = Node((2, 3), None, None, None, (), stack_dim=0, inner=(), members=(Node((3,), None, None, None, ()),) * 2)


IS_ENTRY, _, *LEAVES = pack(TensorDict({}))
"""A record; between these two lies its note."""


def at(*places: tuple[int, int]) -> list[Note | None]:
    """Notes of some elements of 2 x 3."""
    return [WHOLE[row * 3 + column] for row, column in places]


def test_find_structure_when_all_elements_come_then_the_member_as_it_was() -> None:
    assert find_structure(WHOLE, (2, 3), NAMELESS) == Spec(MEMBER)
    assert find_structure(WHOLE, (2, 3), NAMELESS) is find_structure(WHOLE, (2, 3), NAMELESS)
    named = find_structure(WHOLE, (2, 3), ("time", None))
    assert named is not None
    assert named.root == MEMBER._replace(names=("time", None))


def test_find_structure_when_some_were_written_since_then_from_the_notes_of_the_others() -> None:
    some = [WHOLE[0], None, None, WHOLE[3], None, None]
    assert find_structure(some, (2, 3), NAMELESS) == Spec(MEMBER)
    assert find_structure([None, *some[:-1]], (2, 3), NAMELESS) is None, "in other places"
    assert find_structure(some[:3], (1, 3), NAMELESS) is None, "of a part"


def test_find_structure_when_nothing_is_said_or_different_things_then_nothing() -> None:
    other = make_spec([MEMBER._replace(is_locked=False)], (2, 3))
    assert find_structure([None] * 6, (2, 3), NAMELESS) is None
    assert find_structure([], (0, 3), NAMELESS) is None
    assert find_structure([*WHOLE[:5], Note(other, 5)], (2, 3), NAMELESS) is None


@pytest.mark.parametrize(
    ("places", "sizes"),
    [
        (list(itertools.product([1], range(3))), (1, 3)),
        (list(itertools.product([1], range(3))), (3,)),
        (list(itertools.product(range(2), [2])), (2,)),
        (list(itertools.product(range(2), [2])), (2, 1)),
        (list(itertools.product([1, 0], [0, 2])), (2, 2)),
        (list(itertools.product(range(2), range(3))), (1, 2, 3)),
    ],
)
def test_find_structure_when_a_part_is_chosen_then_as_the_same_rows_of_the_member(
    places: list[tuple[int, int]], sizes: tuple[int, ...]
) -> None:
    found = find_structure(at(*places), sizes, (None,) * len(sizes))
    assert found is not None
    assert found.root.batch_size == sizes
    assert not found.root.is_locked
    expected = TensorLeaf("float32", (*sizes, 4), requires_grad=True)
    assert dict(found.root.entries) == {"p": expected, "t": JAGGED._replace(batch_size=sizes)}


def test_find_structure_when_a_stack_lies_in_the_member_then_its_members_that_were_chosen() -> None:
    inner = tuple(Node((3,), None, None, None, ((key, TensorLeaf("int8", (3,))),)) for key in "ab")
    stack = Node((2, 3), None, None, None, (), stack_dim=0, inner=(), members=inner)
    spec = make_spec([MEMBER._replace(entries=(("s", stack),))], (2, 3))
    for rows, keys in (([1], "b"), ([1, 0], "ba")):
        positions = [row * 3 + column for row in rows for column in range(3)]
        found = find_structure([Note(spec, position) for position in positions], (len(rows), 3), NAMELESS)
        assert found is not None
        part = found.find(("s",))
        assert isinstance(part, Node)
        assert [member.entries[0][0] for member in part.members] == list(keys)


@pytest.mark.parametrize(
    ("places", "sizes"),
    [
        ([(0, 0), (1, 1)], (2,)),
        ([(0, 0), (0, 1), (1, 1), (1, 2)], (2, 2)),
        (list(itertools.product(range(2), range(3))), (3, 2)),
        ([(0, 0)] * 4, (2, 2, 1)),
    ],
)
def test_find_structure_when_elements_are_chosen_one_by_one_then_nothing(
    places: list[tuple[int, int]], sizes: tuple[int, ...]
) -> None:
    assert find_structure(at(*places), sizes, (None,) * len(sizes)) is None


def test_find_structure_when_each_element_has_a_row_of_every_member_then_that_one() -> None:
    other = MEMBER._replace(entries=())
    spec = make_spec([MEMBER, other], (2, 3), 2)
    assert spec.root.inner == (-1,)
    notes = [Note(spec, position) for position in range(6)]
    assert find_structure(notes, (2, 3), NAMELESS, number=1, behind=0) == Spec(other)
    assert find_structure(notes, (2, 3), NAMELESS, number=2, behind=0) is None
    assert find_structure(notes, (2, 3), NAMELESS, number=0, behind=1) is None
    assert find_structure(notes, (2, 3), NAMELESS) is None
    assert find_structure(WHOLE, (2, 3), NAMELESS, number=0, behind=0) is None


def test_note_when_held_as_bytes_then_comes_back_with_one_structure_for_all() -> None:
    one, other = (unpack([IS_ENTRY, [position, codec.to_content(SPEC)], *LEAVES]).note for position in (0, 5))
    assert (one, other) == (WHOLE[0], WHOLE[5])
    assert one.spec is other.spec


@pytest.mark.parametrize(
    ("content", "position"),
    [
        (codec.to_content(SPEC), 6),
        (codec.to_content(SPEC), -1),
        (codec.to_content(SPEC), True),
        (codec.to_content(Spec(MEMBER)), 0),
        (codec.to_content(Spec(AROUND)), 0),
    ],
)
def test_note_when_it_is_none_then_refused(content: Any, position: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack([IS_ENTRY, [position, content], *LEAVES])
