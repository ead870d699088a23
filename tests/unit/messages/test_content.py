from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import KeyNotFoundError, RemoteProtocolError, SelectionError
from tdserve.messages.content import (
    GENERATION_KEY,
    INDEX_KEY,
    STATUS,
    STATUS_BYTES,
    ReadStatus,
    cut_values,
    make_rows_layout,
    make_status_column,
    read_layout,
    select_spec,
    write_layout,
    write_messages,
)
from tdserve.messages.layout import MAX_MESSAGE_BYTES
from tdserve.messages.selection.selection import parse
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf, ValueLeaf

NESTED = Node((4, 5), None, None, None, (("c", TensorLeaf("int8", (4, 5))),))
SPEC = Spec(
    Node(
        (4, 5),
        ("time", None),
        None,
        None,
        (("a", TensorLeaf("float32", (4, 5, 2))), ("b", ValueLeaf((4, 5), True)), ("n", NESTED)),
    )
)


@pytest.mark.parametrize(
    ("index", "batch_size"),
    [
        (slice(1, 3), (2, 5)),
        (2, (5,)),
        ((slice(None), [0, 1, 1]), (4, 3)),
        (np.eye(4, 5, dtype=bool), (4,)),
        ((None, ..., 0), (1, 4)),
    ],
)
def test_select_spec_when_indexed_then_every_part_has_the_batch_size_of_the_result(
    index: object, batch_size: tuple[int, ...]
) -> None:
    chosen = select_spec(SPEC, parse(index), ())
    assert chosen.batch_size == batch_size
    assert chosen.root.names is None
    assert dict(chosen.tensors) == {
        ("a",): TensorLeaf("float32", (*batch_size, 2)),
        ("n", "c"): TensorLeaf("int8", batch_size),
    }
    assert dict(chosen.values) == {("b",): ValueLeaf(batch_size, True)}


@pytest.mark.parametrize(
    ("index", "stack_dim"),
    [
        ((slice(0, 2),), 1),
        (0, 0),
        ((slice(None), 1), None),
        (None, 2),
        ((slice(None), None), 2),
        ((slice(None), slice(1, 3), None), 1),
        ((0, None), 1),
        (([0, 2],), 1),
    ],
)
def test_select_spec_when_a_stack_is_indexed_then_stacked_along_the_same_dimension(
    index: object, stack_dim: int | None
) -> None:
    stack = Spec(Node((4, 5), None, None, None, SPEC.root.entries, stack_dim=1))
    assert select_spec(stack, parse(index), ()).root.stack_dim == stack_dim


def test_select_spec_when_everything_then_the_same_spec() -> None:
    assert select_spec(SPEC, parse(()), ()) is SPEC


def test_select_spec_when_keys_are_given_then_only_those() -> None:
    chosen = select_spec(SPEC, parse(3), [("n",), ("b",)])
    assert [path for path, _ in chosen.tensors] == [("n", "c")]
    assert [path for path, _ in chosen.values] == [("b",)]


def test_select_spec_when_a_key_is_unknown_then_error_names_store_and_key() -> None:
    with pytest.raises(KeyNotFoundError) as raised:
        select_spec(SPEC, parse(0), [("n", "x")], store="games")
    assert (raised.value.store, raised.value.key) == ("games", "('n', 'x')")


def test_select_spec_when_index_is_out_of_range_then_error() -> None:
    with pytest.raises(SelectionError):
        select_spec(SPEC, parse((0, 5)), ())


def test_layouts_when_of_one_spec_then_differ_by_their_trailing_columns() -> None:
    assert [slot.path for slot in write_layout(SPEC).slots] == [("a",), ("n", "c")]
    assert [slot.path for slot in read_layout(SPEC).slots] == [("a",), ("n", "c"), (STATUS.name,)]


def test_status_column_when_made_then_fills_its_place_in_the_layout() -> None:
    column = make_status_column(ReadStatus.TORN, 7, 3)
    assert column.tolist() == [ReadStatus.TORN, 7, 3, 0, 0, 0, 0, 0]
    assert make_status_column(ReadStatus.WHOLE).tolist() == [ReadStatus.WHOLE, 0, 0, 0, 0, 0, 0, 0]
    assert (column.dtype, column.shape) == (np.dtype(STATUS.dtype), STATUS.shape)
    assert column.nbytes == read_layout(SPEC).slots[-1].nbytes == STATUS_BYTES


def test_rows_layout_when_rows_are_counted_then_has_numbers_and_generations() -> None:
    layout = make_rows_layout(SPEC, 3)
    assert [(slot.path, slot.shape) for slot in layout.slots] == [
        (("a",), (3, 5, 2)),
        (("n", "c"), (3, 5)),
        ((INDEX_KEY,), (3,)),
        ((GENERATION_KEY,), (3,)),
        ((STATUS.name,), (8,)),
    ]
    assert make_rows_layout(SPEC, 3) is layout


def test_values_messages_when_cut_then_none_is_longer_than_a_message_may_be_and_nothing_is_missing() -> None:
    assert cut_values(0) == ()
    for nbytes in (1, MAX_MESSAGE_BYTES, 2 * MAX_MESSAGE_BYTES + 5):
        messages = cut_values(nbytes)
        assert [message.offset for message in messages] == [
            number * MAX_MESSAGE_BYTES for number in range(len(messages))
        ]
        assert sum(message.nbytes for message in messages) == nbytes
        assert max(message.nbytes for message in messages) <= MAX_MESSAGE_BYTES
        assert not any(message.parts for message in messages)


@pytest.mark.parametrize("nbytes", [0, 70_000, MAX_MESSAGE_BYTES + 1])
def test_write_messages_when_announced_then_leaves_before_values(nbytes: int) -> None:
    layout = write_layout(SPEC)
    expected = (*layout.messages, *cut_values(nbytes))
    assert write_messages(layout, nbytes, [message.nbytes for message in expected]) == expected


@pytest.mark.parametrize(
    ("nbytes", "announced"), [(70_000, ()), (70_000, (69_999,)), (0, (1,)), (1 << 63, (1 << 63,)), (1 << 63, ())]
)
def test_write_messages_when_others_are_announced_then_refused_at_once(nbytes: int, announced: tuple[int, ...]) -> None:
    layout = write_layout(SPEC)
    with pytest.raises(RemoteProtocolError):
        write_messages(layout, nbytes, (*layout.message_nbytes, *announced))


def test_select_spec_when_members_are_selected_then_those_are_known() -> None:
    members = tuple(Node((4,), None, None, None, ((f"x{i}", TensorLeaf("int8", (4, i))),)) for i in range(3))
    node = Node((4, 3), None, None, None, (), stack_dim=1, inner=(), members=members)
    spec = Spec(Node((4, 3), None, None, None, (("s", node),)))

    def keys(index: object) -> list[str]:
        found = dict(select_spec(spec, parse(index), ()).root.entries)["s"]
        assert isinstance(found, Node)
        return [member.entries[0][0] for member in found.members]

    assert keys(slice(1, 3)) == ["x0", "x1", "x2"]
    assert keys((slice(None), slice(None, None, 2))) == ["x0", "x2"]
    assert keys((slice(None), np.array([2, 0]))) == ["x2", "x0"]
    assert keys((slice(None), np.array([False, True, True]))) == ["x1", "x2"]
    assert keys((np.array([True, False, True, False]), 1)) == ["x1"]
    assert keys((None, slice(2))) == ["x0", "x1", "x2"]
    assert keys(2) == keys((np.array([0, 1]), np.array([0, 1]))) == keys(np.ones((4, 3), bool)) == []
