from __future__ import annotations

import pytest

from tdserve.structure.stacks.annotation import count_levels, find_shared_values, is_note_needed, is_same
from tdserve.structure.trees.nodes import PACKED, Entry, Form, Node, Params, Ragged, TensorKind, TensorLeaf, ValueLeaf

PLAIN: tuple[tuple[str, Entry], ...] = (("x", TensorLeaf("float32", (2, 3))), ("v", ValueLeaf((2,), False)))
MEMBER = Node((2,), ("a",), "cpu", "module.Class", PLAIN)
JAGGED = Ragged(Form.JAGGED, "float32", (-1,))


def around(node: Node) -> Node:
    return MEMBER._replace(entries=(*PLAIN, ("n", node)))


def holding(entry: Entry) -> Node:
    return MEMBER._replace(entries=(*PLAIN, ("e", entry)))


def test_note_when_elements_describe_everything_then_not_needed() -> None:
    nodes = (MEMBER, around(MEMBER), holding(ValueLeaf((2,), False, is_unbatched=True)))
    assert not is_note_needed(nodes, (2,), is_locked=False)


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
def test_note_when_elements_lack_something_then_needed(member: Node) -> None:
    assert is_note_needed((MEMBER, member), (2,), is_locked=False)
    assert is_note_needed((MEMBER, around(member)), (2,), is_locked=True)


def test_note_when_a_member_is_locked_then_needed_unless_all_are() -> None:
    locked = MEMBER._replace(is_locked=True)
    assert is_note_needed((locked, MEMBER), (2,), is_locked=False)
    assert is_note_needed((around(locked), MEMBER), (2,), is_locked=False)
    assert not is_note_needed((locked, around(locked)), (2,), is_locked=True)


def test_note_when_there_are_no_elements_then_needed() -> None:
    assert is_note_needed((MEMBER,), (2, 0), is_locked=False)


def test_levels_when_counted_then_members_lie_in_their_stack() -> None:
    assert count_levels(MEMBER) == 1
    assert count_levels(around(around(MEMBER))) == 3
    stack = Node((2,), None, None, None, (("x", MEMBER),), stack_dim=1, inner=(2,), members=(MEMBER, around(MEMBER)))
    assert count_levels(stack) == 3  # facts that are known only of elements lie nowhere
    assert count_levels(around(stack)) == 4


def test_shared_values_when_listed_then_those_of_all_elements() -> None:
    entries: tuple[tuple[str, Entry], ...] = (
        *PLAIN,
        ("r", ValueLeaf((2,), True)),
        ("j", ValueLeaf((2,), True, JAGGED)),
        ("p", Node((2,), None, None, None, (), inner=())),
        ("u", ValueLeaf((2,), False, is_unbatched=True)),
        ("q", ValueLeaf((2,), True, PACKED)),
    )
    assert list(find_shared_values(MEMBER._replace(entries=entries))) == [("u",), ("v",)]


def test_alike_when_only_device_and_names_differ_then_it_is() -> None:
    other = around(MEMBER)._replace(names=None, device=None, entries=around(MEMBER).entries[::-1])
    assert is_same([MEMBER, around(MEMBER)], [MEMBER, other], is_locked=False)


def test_alike_when_all_that_is_written_is_locked_then_locks_do_not_count() -> None:
    locked = [around(MEMBER._replace(is_locked=True))]
    assert is_same(locked, [around(MEMBER)], is_locked=True)
    assert not is_same(locked, [around(MEMBER)], is_locked=False)


@pytest.mark.parametrize(
    "actual",
    [
        MEMBER._replace(batch_size=(3,)),
        MEMBER._replace(tensorclass=None),
        MEMBER._replace(stack_dim=0),
        MEMBER._replace(is_locked=True),
        MEMBER._replace(params=Params()),
        MEMBER._replace(inner=()),
        MEMBER._replace(entries=PLAIN[:1]),
        MEMBER._replace(entries=(*PLAIN[1:], ("x", TensorLeaf("float32", (2, 3), TensorKind.PARAMETER)))),
        MEMBER._replace(entries=(*PLAIN[:1], ("v", ValueLeaf((2,), True)))),
        MEMBER._replace(entries=(*PLAIN[:1], ("v", MEMBER))),
    ],
)
def test_alike_when_anything_else_differs_then_not(actual: Node) -> None:
    assert not is_same([MEMBER], [actual], is_locked=False)
    assert not is_same([around(actual)], [around(MEMBER)], is_locked=False)
