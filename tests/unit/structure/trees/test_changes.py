"""Changes of a tree of nodes that concern lazy stacks and ragged leaves; the others are tested as those of a spec."""

from __future__ import annotations

from tdserve.structure.trees.changes import (
    drop_batch_dim,
    move_to_cpu,
    rebatch,
    redevice,
    replace_entries,
    set_locks,
    set_per_row,
    strip_to_content,
)
from tdserve.structure.trees.nodes import Form, Node, Ragged, TensorKind, TensorLeaf, ValueLeaf, has_state

RAGGED = Ragged(Form.STACK, "float32", (-1,))
INNER = Node((4, 2), None, None, None, (("x", TensorLeaf("float32", (4, 2, 3))),))
STACK = Node(
    (4,), ("n",), "cpu", None, (("a", ValueLeaf((4,), True, RAGGED)), ("s", ValueLeaf((4,), False)), ("n", INNER)), 0
)


def test_rebatch_when_rows_are_chosen_then_still_a_stack() -> None:
    assert rebatch(STACK, 1, (2,), None).stack_dim == 0
    assert rebatch(STACK, 1, (2, 2), None).stack_dim == 0
    assert rebatch(STACK, 0, (5,), None).stack_dim == 1


def test_rebatch_when_the_stacked_dimension_goes_then_no_stack() -> None:
    assert rebatch(STACK, 1, (), None).stack_dim is None
    two = STACK._replace(batch_size=(4, 2))
    assert rebatch(two, 2, (2,), None, (None, 0)).stack_dim is None
    assert rebatch(two._replace(stack_dim=1), 2, (2,), None, (None, 0)).stack_dim == 0


def test_rebatch_when_rows_are_to_be_stacked_then_along_the_first_dimension_in_front() -> None:
    row = Node((), None, None, None, (("a", ValueLeaf((), False, RAGGED)),), -1)
    made = rebatch(row, 0, (7,), None)
    assert made.stack_dim == 0
    assert made.entries == (("a", ValueLeaf((7,), True, RAGGED)),)
    assert rebatch(row, 0, (), None).stack_dim == -1


def test_unstacked_when_it_is_a_stack_then_one_row() -> None:
    row = drop_batch_dim(STACK, 0)
    assert (row.batch_size, row.names, row.stack_dim) == ((), None, None)
    entries = dict(row.entries)
    assert entries["a"] == ValueLeaf((), False, RAGGED)
    assert entries["n"] == INNER._replace(batch_size=(2,), entries=(("x", TensorLeaf("float32", (2, 3))),))


def test_replaced_when_a_path_is_named_then_only_its_entry_changes() -> None:
    leaf = TensorLeaf("int64", (4, 2))
    found = replace_entries(STACK, {("n", "x"): leaf})
    assert dict(found.entries)["n"] == INNER._replace(entries=(("x", leaf),))
    assert found.entries[:2] == STACK.entries[:2]


def test_redevice_when_nodes_are_nested_then_every_one() -> None:
    found = redevice(STACK, None)
    assert found.device is None
    assert redevice(found, "cuda:0").entries[2][1] == INNER._replace(device="cuda:0")


def test_per_row_when_values_are_shared_then_one_for_each() -> None:
    assert dict(set_per_row(STACK).entries)["s"] == ValueLeaf((4,), True)


def test_set_locks_when_asked_then_every_node() -> None:
    found = set_locks(STACK, True)
    assert found.is_locked
    assert found.entries[2][1] == INNER._replace(is_locked=True)
    assert set_locks(found, False) == STACK


def test_rebatch_when_locked_then_rows_are_not() -> None:
    assert rebatch(set_locks(STACK, True), 1, (2,), None) == rebatch(STACK, 1, (2,), None)


def test_move_to_cpu_when_nodes_have_devices_then_all_of_them_are_the_cpu() -> None:
    inner = Node((2,), None, "cuda:1", None, (("x", TensorLeaf("float32", (2,))),))
    root = Node((2,), None, None, None, (("n", inner), ("y", TensorLeaf("int8", (2,)))))
    assert move_to_cpu(root) == root._replace(
        entries=(("n", inner._replace(device="cpu")), ("y", TensorLeaf("int8", (2,))))
    )


PACKED_NODE = Node((4, 2), None, None, None, (), 0, (3,))


def test_rebatch_when_a_packed_node_loses_the_dimension_it_is_stacked_along_then_one_row_of_it() -> None:
    assert rebatch(PACKED_NODE, 1, (), None, (None,)).stack_dim == -1
    assert rebatch(PACKED_NODE, 2, (), None, (None, None)).stack_dim is None
    assert rebatch(PACKED_NODE, 2, (4,), None, (0, None)).stack_dim is None
    assert drop_batch_dim(PACKED_NODE, 0).stack_dim == -1


def member(number: int, batch_size: tuple[int, ...] = (3,)) -> Node:
    leaf = TensorLeaf("float32", (*batch_size, number), TensorKind.PARAMETER, True)
    return Node(batch_size, None, "cuda:0", None, ((f"x{number}", leaf),), is_locked=True)


OF_MEMBERS = Node((2, 3), None, None, None, (), stack_dim=0, inner=(), members=(member(0), member(1)))


def first_leaf(node: Node) -> TensorLeaf:
    leaf = node.entries[0][1]
    assert isinstance(leaf, TensorLeaf)
    return leaf


def test_rebatch_when_members_are_chosen_then_those_as_they_are() -> None:
    found = rebatch(OF_MEMBERS, 2, (3, 3), (None, None), (0, 1), ((1, 0, 1), range(3)))
    assert found.members == (member(1), member(0), member(1))
    one = rebatch(OF_MEMBERS, 2, (3,), (None,), (None, 0), ((1,), range(3)))
    assert (one.stack_dim, one.members) == (-1, (member(1),))


def test_rebatch_when_rows_of_members_are_chosen_then_smaller_and_plain_ones() -> None:
    for taken in ((range(2), (0, 2)), (range(2), (0, 1, 2)), (range(2), range(2))):
        num_rows = len(taken[1])
        found = rebatch(OF_MEMBERS, 2, (2, num_rows), (None, None), (0, 1), taken)
        assert [each.batch_size for each in found.members] == [(num_rows,), (num_rows,)]
        assert [each.is_locked for each in found.members] == [False, False]
        assert first_leaf(found.members[1]) == TensorLeaf("float32", (num_rows, 1), requires_grad=True)
    row = rebatch(OF_MEMBERS, 2, (2,), (None,), (0, None), (range(2), (1,)))
    assert (row.stack_dim, row.members) == (None, ())


def test_rebatch_when_it_is_not_known_which_members_remain_then_none_are() -> None:
    assert rebatch(OF_MEMBERS, 2, (2, 3), None).members == ()
    assert rebatch(OF_MEMBERS, 1, (2,), None).members == ()


def test_rebatch_when_dimensions_come_in_front_then_of_members_too() -> None:
    found = rebatch(OF_MEMBERS, 0, (7,), None)
    assert (found.stack_dim, [each.batch_size for each in found.members]) == (1, [(7, 3), (7, 3)])
    again = rebatch(found, 1, (5,), None)
    assert [each.batch_size for each in again.members] == [(5, 3), (5, 3)]
    new = rebatch(OF_MEMBERS, 2, (1, 2, 3), (None,) * 3, (1, 2), (range(2), range(3)))
    assert (new.stack_dim, [each.batch_size for each in new.members]) == (1, [(1, 3), (1, 3)])


def test_tree_when_changed_as_a_whole_then_members_are_too() -> None:
    assert [each.device for each in redevice(OF_MEMBERS, None).members] == [None, None]
    assert [each.device for each in move_to_cpu(OF_MEMBERS).members] == ["cpu", "cpu"]
    assert [each.is_locked for each in set_locks(OF_MEMBERS, False).members] == [False, False]


def test_strip_to_content_when_a_node_is_packed_then_its_members_keep_what_they_are_put_together_with() -> None:
    assert has_state(OF_MEMBERS)
    assert strip_to_content(OF_MEMBERS).members == OF_MEMBERS.members
    assert not has_state(strip_to_content(OF_MEMBERS._replace(members=())))


def test_unstacked_when_another_dimension_goes_then_of_members_too() -> None:
    batch = OF_MEMBERS._replace(batch_size=(2, 3, 4), members=(member(0, (3, 4)), member(1, (3, 4))))
    found = drop_batch_dim(batch, 2)
    assert (found.stack_dim, [each.batch_size for each in found.members]) == (0, [(3,), (3,)])
    assert drop_batch_dim(batch, 0).members == ()
    assert drop_batch_dim(OF_MEMBERS, 1).members == ()


def test_rebatch_when_other_dimensions_of_a_packed_node_change_then_stacked_as_it_was() -> None:
    assert rebatch(PACKED_NODE, 1, (7,), None).stack_dim == 0
    assert rebatch(PACKED_NODE, 0, (7,), None).stack_dim == 1
    along_2 = PACKED_NODE._replace(stack_dim=2)
    assert rebatch(along_2, 1, (), None, (None,)).stack_dim == 1
    assert rebatch(along_2, 2, (), None, (None, None)).stack_dim is None
    assert drop_batch_dim(along_2, 0).stack_dim == 1
    row = PACKED_NODE._replace(batch_size=(2,), stack_dim=-1)
    assert rebatch(row, 0, (7,), None).stack_dim == -1
    assert rebatch(PACKED_NODE._replace(stack_dim=None), 1, (7,), None).stack_dim is None
