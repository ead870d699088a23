from __future__ import annotations

import numpy as np
import pytest

from tdserve.replay.live_rows import LiveRows
from tdserve.replay.sampler import Uniform


def _chi_square(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(num_cells: int) -> float:
    """Chi-square that a fair source exceeds once in about 100,000 times (Wilson and Hilferty)."""
    freedom = num_cells - 1
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 4.265 * part**0.5) ** 3)


@pytest.mark.parametrize("seed", range(4))
def test_draw_when_rows_come_and_go_then_every_live_row_is_equally_likely(seed: int) -> None:
    live = LiveRows(1000)
    live.add(np.arange(1000))
    live.remove(np.random.default_rng(seed).permutation(1000)[:600])
    live.add(np.setdiff1d(np.arange(1000), live.rows())[:100])
    rng = np.random.default_rng(seed)
    drawn = np.concatenate([Uniform().draw(live, 256, rng=rng) for _ in range(400)])
    counts = np.bincount(drawn, minlength=1000)
    assert counts.sum() == counts[live.rows()].sum()
    assert _chi_square(counts[live.rows()]) < _limit(500)


def test_draw_when_seen_in_pairs_then_draws_are_independent() -> None:
    live = LiveRows(16)
    live.add(np.arange(16))
    drawn = Uniform().draw(live, 2 * 51_200, rng=np.random.default_rng(0)).reshape(-1, 2)
    pairs = np.bincount(drawn[:, 0] * 16 + drawn[:, 1], minlength=256)
    assert _chi_square(pairs) < _limit(256)


def test_chi_square_when_a_source_is_slightly_unfair_then_exceeds_the_limit() -> None:
    weights = np.ones(500)
    weights[:50] = 1.2
    drawn = np.random.default_rng(0).choice(500, 102_400, p=weights / weights.sum())
    assert _chi_square(np.bincount(drawn, minlength=500)) > _limit(500)


def test_draw_when_more_are_asked_than_live_then_rows_repeat() -> None:
    live = LiveRows(4)
    live.add(np.array([2]))
    assert Uniform().draw(live, 3, rng=np.random.default_rng(0)).tolist() == [2, 2, 2]
