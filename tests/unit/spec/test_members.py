from __future__ import annotations

import pytest

from tdserve.spec.members import needs_note, num_levels, shared_values
from tdserve.spec.nodes import PACKED, Entry, Form, Node, Params, Ragged, TensorKind, TensorLeaf, ValueLeaf

PLAIN: tuple[tuple[str, Entry], ...] = (("x", TensorLeaf("float32", (2, 3))), ("v", ValueLeaf((2,), False)))
MEMBER = Node((2,), ("a",), "cpu", "module.Class", PLAIN)
JAGGED = Ragged(Form.JAGGED, "float32", (-1,))


def around(node: Node) -> Node:
    return MEMBER._replace(entries=(*PLAIN, ("n", node)))


def holding(entry: Entry) -> Node:
    return MEMBER._replace(entries=(*PLAIN, ("e", entry)))


def test_note_when_elements_tell_everything_then_not_needed() -> None:
    told = (MEMBER, around(MEMBER), holding(ValueLeaf((2,), False, is_unbatched=True)))
    assert not needs_note(told, (2,), is_locked=False)


@pytest.mark.parametrize(
    "member",
    [
        MEMBER._replace(params=Params()),
        MEMBER._replace(stack_dim=0),
        MEMBER._replace(inner=()),
        holding(TensorLeaf("float32", (2,), TensorKind.BUFFER)),
        holding(TensorLeaf("float32", (2,), requires_grad=True)),
        holding(ValueLeaf((2,), True)),
        holding(ValueLeaf((2,), True, JAGGED)),
    ],
)
def test_note_when_elements_do_not_tell_something_then_needed(member: Node) -> None:
    assert needs_note((MEMBER, member), (2,), is_locked=False)
    assert needs_note((MEMBER, around(member)), (2,), is_locked=True)


def test_note_when_a_member_is_locked_then_needed_unless_all_are() -> None:
    locked = MEMBER._replace(is_locked=True)
    assert needs_note((locked, MEMBER), (2,), is_locked=False)
    assert needs_note((around(locked), MEMBER), (2,), is_locked=False)
    assert not needs_note((locked, around(locked)), (2,), is_locked=True)


def test_note_when_there_are_no_elements_then_needed() -> None:
    assert needs_note((MEMBER,), (2, 0), is_locked=False)


def test_levels_when_counted_then_members_lie_in_their_stack() -> None:
    assert num_levels(MEMBER) == 1
    assert num_levels(around(around(MEMBER))) == 3
    stack = Node((2,), None, None, None, (("x", MEMBER),), stack_dim=1, inner=(2,), members=(MEMBER, around(MEMBER)))
    assert num_levels(stack) == 3  # what is only known of elements lies nowhere
    assert num_levels(around(stack)) == 4


def test_shared_values_when_listed_then_those_of_all_elements() -> None:
    entries: tuple[tuple[str, Entry], ...] = (
        *PLAIN,
        ("r", ValueLeaf((2,), True)),
        ("j", ValueLeaf((2,), True, JAGGED)),
        ("p", Node((2,), None, None, None, (), inner=())),
        ("u", ValueLeaf((2,), False, is_unbatched=True)),
        ("q", ValueLeaf((2,), True, PACKED)),
    )
    assert list(shared_values(MEMBER._replace(entries=entries))) == [("u",), ("v",)]
