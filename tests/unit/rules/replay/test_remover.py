from __future__ import annotations

import numpy as np
import pytest

from tdserve.rules.replay.remover import Fifo, LowestPriority, Remover
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers import order


def test_fifo_when_asked_for_an_evictor_then_the_ring_is_the_rule() -> None:
    assert Fifo is order.Fifo
    remover: Remover = Fifo()
    assert remover.make_evictor(RowColumns(5), 5) is None


def test_lowest_priority_when_compared_then_equal_as_settings_must_be() -> None:
    remover: Remover = LowestPriority()
    assert remover == LowestPriority()
    assert (remover.kind, remover.uses_priority) == ("lowest_priority", True)


@pytest.mark.parametrize("seed", range(3))
def test_lowest_when_rows_and_priorities_change_then_as_sorted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = RowColumns(300)
    evictor = LowestPriority().make_evictor(columns, 300)
    members: set[int] = set()
    for _ in range(100):
        rows = rng.choice(300, rng.integers(0, 40), replace=False)
        columns.priority[rows] = rng.integers(0, 1000, len(rows)) * rng.integers(0, 2, len(rows))
        new = rows[[int(row) not in members for row in rows]]
        evictor.add(new)
        members.update(new.tolist())
        changed = rng.choice(300, 30, replace=False)
        columns.priority[changed] = rng.integers(0, 1000, 30)
        evictor.update(rows)
        evictor.update(changed)
        gone = rng.choice(300, 15, replace=False)
        evictor.remove(gone)
        members.difference_update(gone.tolist())
        assert len(evictor) == len(members)
        num_rows = int(rng.integers(1, 60))
        lowest = evictor.find_first(num_rows)
        assert set(lowest.tolist()) <= members
        assert len(set(lowest.tolist())) == len(lowest)
        expected = sorted(columns.priority[list(members)].tolist())[:num_rows]
        assert columns.priority[lowest].tolist() == expected


def test_lowest_when_priorities_are_zero_then_rows_are_there_all_the_same() -> None:
    evictor = LowestPriority().make_evictor(RowColumns(100), 100)
    evictor.add(np.array([7, 3, 99]))
    assert sorted(evictor.find_first(5).tolist()) == [3, 7, 99]
    assert len(evictor) == 3
    assert repr(evictor) == "<PriorityOrder 3 rows, lowest first>"
