from __future__ import annotations

import pickle

import pytest

from tdserve.spec.nodes import Node, TensorLeaf, ValueLeaf


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
