from __future__ import annotations

import pickle

import pytest

from tdserve.structure.trees.nodes import (
    PACKED,
    Entry,
    Form,
    Node,
    Ragged,
    TensorLeaf,
    ValueLeaf,
    count_dims,
    find_entry,
)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (3, 4), 48), ("complex128", (), 16), ("bool", (5, 0), 0), ("float8_e8m0fnu", (7,), 7)],
)
def test_leaf_when_measured_then_counts_packed_bytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorLeaf(dtype, shape).nbytes == nbytes


def test_parts_when_assigned_to_then_refuse() -> None:
    with pytest.raises(AttributeError):
        TensorLeaf("bool", ()).dtype = "int8"  # type: ignore[misc]


def test_parts_of_different_kinds_when_compared_then_differ() -> None:
    parts = [TensorLeaf("bool", ()), ValueLeaf((), False), ValueLeaf((), True), Node((), None, None, None, ())]
    assert len(set(parts)) == 4
    assert pickle.loads(pickle.dumps(parts)) == parts


def test_entry_of_when_asked_then_what_is_there_or_none() -> None:
    leaf = TensorLeaf("bool", ())
    root = Node((), None, None, None, (("n", Node((), None, None, None, (("c", leaf),))),))
    assert find_entry(root, ()) is root
    assert find_entry(root, ("n", "c")) is leaf
    assert find_entry(root, ("n", "q")) is None
    assert find_entry(root, ("n", "c", "d")) is None


@pytest.mark.parametrize(
    ("entry", "num_dims"),
    [
        (TensorLeaf("bool", (4, 3)), 2),
        (Node((4,), None, None, None, (), inner=(-1, 2)), 3),
        (ValueLeaf((4, 2), True), 2),
        (ValueLeaf((4,), True, Ragged(Form.JAGGED, "bool", (-1, 2))), 3),
        (ValueLeaf((4,), True, PACKED), None),
        (ValueLeaf((4,), False, is_unbatched=True), None),
    ],
)
def test_num_dims_of_when_only_content_has_them_then_none(entry: Entry, num_dims: int | None) -> None:
    assert count_dims(entry) == num_dims
