from __future__ import annotations

import numpy as np
import pytest

from tdserve.content import (
    GENERATION_KEY,
    INDEX_KEY,
    STATUS,
    STATUS_BYTES,
    ReadStatus,
    read_layout,
    rows_layout,
    selected_spec,
    status_column,
    write_layout,
)
from tdserve.errors import KeyNotFoundError, SelectionError
from tdserve.selection import parse
from tdserve.spec.tree import Node, Spec, TensorLeaf, ValueLeaf

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
def test_selected_spec_when_indexed_then_every_part_has_the_batch_size_of_the_result(
    index: object, batch_size: tuple[int, ...]
) -> None:
    chosen = selected_spec(SPEC, parse(index), ())
    assert chosen.batch_size == batch_size
    assert chosen.root.names is None
    assert dict(chosen.tensors) == {
        ("a",): TensorLeaf("float32", (*batch_size, 2)),
        ("n", "c"): TensorLeaf("int8", batch_size),
    }
    assert dict(chosen.values) == {("b",): ValueLeaf(batch_size, True)}


def test_selected_spec_when_everything_then_the_same_spec() -> None:
    assert selected_spec(SPEC, parse(()), ()) is SPEC


def test_selected_spec_when_keys_are_given_then_only_those() -> None:
    chosen = selected_spec(SPEC, parse(3), [("n",), ("b",)])
    assert [path for path, _ in chosen.tensors] == [("n", "c")]
    assert [path for path, _ in chosen.values] == [("b",)]


def test_selected_spec_when_a_key_is_unknown_then_error_names_store_and_key() -> None:
    with pytest.raises(KeyNotFoundError) as raised:
        selected_spec(SPEC, parse(0), [("n", "x")], store="games")
    assert raised.value.fields == {"store": "games", "key": "('n', 'x')"}


def test_selected_spec_when_index_is_out_of_range_then_error() -> None:
    with pytest.raises(SelectionError):
        selected_spec(SPEC, parse((0, 5)), ())


def test_layouts_when_of_one_spec_then_differ_by_their_trailing_columns() -> None:
    assert [slot.path for slot in write_layout(SPEC).slots] == [("a",), ("n", "c")]
    assert [slot.path for slot in read_layout(SPEC).slots] == [("a",), ("n", "c"), (STATUS.name,)]


def test_status_column_when_made_then_fills_its_place_in_the_layout() -> None:
    column = status_column(ReadStatus.TORN, 7, 3)
    assert column.tolist() == [ReadStatus.TORN, 7, 3, 0, 0, 0, 0, 0]
    assert status_column(ReadStatus.WHOLE).tolist() == [ReadStatus.WHOLE, 0, 0, 0, 0, 0, 0, 0]
    assert (column.dtype, column.shape) == (np.dtype(STATUS.dtype), STATUS.shape)
    assert column.nbytes == read_layout(SPEC).slots[-1].nbytes == STATUS_BYTES


def test_rows_layout_when_rows_are_counted_then_has_numbers_and_generations() -> None:
    layout = rows_layout(SPEC, 3)
    assert [(slot.path, slot.shape) for slot in layout.slots] == [
        (("a",), (3, 5, 2)),
        (("n", "c"), (3, 5)),
        ((INDEX_KEY,), (3,)),
        ((GENERATION_KEY,), (3,)),
        ((STATUS.name,), (8,)),
    ]
    assert rows_layout(SPEC, 3) is layout
