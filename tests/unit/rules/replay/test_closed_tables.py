"""Readers of a closed table wait as long as rows may come back, and then get its end."""

from __future__ import annotations

import pytest

from tdserve.base.errors import EndOfStreamError
from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.rank_draws import RankDraw
from tests.unit.rules.replay.tables import planned, rng, table_of, write


@pytest.mark.parametrize("ends", ["finish", "undo"])
def test_closed_when_a_sample_under_way_has_the_last_rows_then_the_end_comes_with_its_own(ends: str) -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 4)
    table.close()
    plan = planned(table, 4)
    assert table.samples.draw_sample(4, rng=rng()) is None
    getattr(table.samples, ends)(plan)
    if ends == "undo":
        table.samples.finish(planned(table, 4))
    with pytest.raises(EndOfStreamError, match="0 rows are left"):
        table.samples.draw_sample(4, rng=rng())


def test_closed_when_a_draw_for_ranks_has_the_last_rows_then_the_end() -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 4)
    table.close()
    assert RankDraw.make(table, 0, DrawTerms(2, 2, PLAIN), rng=rng()) is not None
    with pytest.raises(EndOfStreamError, match="0 rows are left"):
        RankDraw.make(table, 1, DrawTerms(2, 2, PLAIN), rng=rng())
