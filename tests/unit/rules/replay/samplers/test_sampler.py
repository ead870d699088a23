from __future__ import annotations

import numpy as np
import pytest

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.priority_order import LowestPriority
from tdserve.rules.replay.samplers.sampler import Sampler, Uniform, UniformSelector
from tdserve.rules.replay.samplers.selector import Selector
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tests import chi_square

ROW_SAMPLERS: list[Sampler] = [Uniform(), Prioritized(), Fifo(), Lifo(), LowestPriority(), WithoutReplacement()]
"""Those that choose rows one by one."""


def _uniform(num_rows: int, capacity: int) -> UniformSelector:
    selector = Uniform().make_selector(RowColumns(capacity), capacity)
    selector.add(np.arange(num_rows))
    return selector


def _rows(selector: Selector, num_rows: int, rng: np.random.Generator) -> Rows:
    drawn = selector.draw(num_rows, rng=rng)
    assert drawn is not None
    return drawn.rows


@pytest.mark.parametrize("seed", range(4))
def test_draw_when_rows_come_and_go_then_every_live_row_is_equally_likely(seed: int) -> None:
    selector = _uniform(1000, 1000)
    gone = np.random.default_rng(seed).permutation(1000)[:600]
    selector.remove(gone)
    selector.add(np.sort(gone)[:100])
    live = np.setdiff1d(np.arange(1000), np.sort(gone)[100:])
    rng = np.random.default_rng(seed)
    drawn = np.concatenate([_rows(selector, 256, rng) for _ in range(400)])
    counts = np.bincount(drawn, minlength=1000)
    assert counts.sum() == counts[live].sum()
    assert chi_square.statistic(counts[live]) < chi_square.limit(500)


def test_draw_when_seen_in_pairs_then_draws_are_independent() -> None:
    drawn = _rows(_uniform(16, 16), 2 * 51_200, np.random.default_rng(0)).reshape(-1, 2)
    pairs = np.bincount(drawn[:, 0] * 16 + drawn[:, 1], minlength=256)
    assert chi_square.statistic(pairs) < chi_square.limit(256)


def test_chi_square_when_a_source_is_slightly_unfair_then_exceeds_the_limit() -> None:
    weights = np.ones(500)
    weights[:50] = 1.2
    drawn = np.random.default_rng(0).choice(500, 102_400, p=weights / weights.sum())
    assert chi_square.statistic(np.bincount(drawn, minlength=500)) > chi_square.limit(500)
    assert chi_square.statistic(np.bincount(drawn, minlength=500), weights / weights.sum()) < chi_square.limit(500)


def test_draw_when_more_are_asked_than_live_then_rows_repeat() -> None:
    selector = Uniform().make_selector(RowColumns(4), 4)
    selector.add(np.array([2]))
    assert _rows(selector, 3, np.random.default_rng(0)).tolist() == [2, 2, 2]
    assert repr(selector) == "<UniformSelector <LiveRows 1 of 4>>"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ROW_SAMPLERS, ids=lambda sampler: sampler.kind)
@pytest.mark.parametrize("seed", range(3))
def test_selector_when_rows_come_and_go_then_only_members_are_drawn(sampler: Sampler, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = RowColumns(100)
    sampler.check(100)
    selector = sampler.make_selector(columns, 100)
    members: set[int] = set()
    assert selector.draw(1, rng=rng) is None
    for step in range(200):
        rows = rng.choice(100, rng.integers(0, 30), replace=False)
        new = rows[[int(row) not in members for row in rows]]
        columns.sequence[new] = 100 * step + np.arange(len(new))
        columns.priority[rows] = rng.random(len(rows))
        selector.add(new)
        selector.update(rows)
        members |= set(new.tolist())
        gone = rng.choice(100, 12, replace=False)
        selector.remove(gone)
        members -= set(gone.tolist())
        assert len(selector) == len(members)
        if members:
            num_rows = int(rng.integers(1, len(members) + 1))
            drawn = selector.draw(num_rows, rng=rng)
            assert drawn is not None
            assert len(drawn.rows) == num_rows
            assert drawn.rows.dtype == np.int64
            assert set(drawn.rows.tolist()) <= members
            assert all(len(column) == num_rows for column in drawn.columns.values())


@pytest.mark.parametrize("sampler", ROW_SAMPLERS, ids=lambda sampler: sampler.kind)
def test_draw_when_seeded_then_reproducible(sampler: Sampler) -> None:
    columns = RowColumns(50)
    columns.sequence[:] = np.arange(50)
    columns.priority[:] = 1.0
    drawn = []
    for _ in range(2):
        selector = sampler.make_selector(columns, 50)
        selector.add(np.arange(50))
        drawn.append(_rows(selector, 20, np.random.default_rng(7)).tolist())
    assert drawn[0] == drawn[1]
