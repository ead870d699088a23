from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.rules.replay.row_indexes.columns import RowColumns


def test_array_when_first_needed_then_made_once_and_of_zeros() -> None:
    columns = RowColumns(5)
    made = columns.get_array("x", np.int64)
    assert (made.shape, made.dtype.name, made.tolist()) == ((5,), "int64", [0] * 5)
    made[3] = 7
    assert columns.get_array("x", np.int64) is made
    assert columns.get_array("wide", np.uint64, 2).shape == (5, 2)


def test_columns_when_named_then_of_their_kinds() -> None:
    asked: list[tuple[str, str, tuple[int, ...]]] = []

    def make(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        asked.append((name, dtype.name, shape))
        return np.zeros(shape, dtype)

    columns = RowColumns(3, make)
    assert asked == []  # a table that needs no column has no file for one
    for name in ("sequence", "priority", "times_sampled", "previous", "is_end"):
        assert getattr(columns, name) is getattr(columns, name)
    assert asked == [
        ("sequence", "int64", (3,)),
        ("priority", "float64", (3,)),
        ("times_sampled", "int64", (3,)),
        ("previous", "int64", (3,)),
        ("is_end", "bool", (3,)),
    ]


def test_columns_when_made_then_without_trajectories() -> None:
    assert RowColumns(3).trajectories is None
