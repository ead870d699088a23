from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import PLAIN, SampleConditions
from tdserve.rules.replay.limiter import Queue, SampleToInsertRatio
from tdserve.rules.replay.rank_draws import MAX_DRAWN_ROWS, RankDraw, plan_share
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.priority_order import HighestPriority
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tests.unit.rules.replay.tables import delete, rng, table_of, write

SAMPLERS: list[dict[str, Any]] = [
    {},
    *({"sampler": sampler} for sampler in (Prioritized(), Fifo(), Lifo(), HighestPriority(), WithoutReplacement())),
]


@pytest.mark.parametrize("parts", SAMPLERS)
def test_make_when_all_rows_are_needed_then_each_once(parts: dict[str, Any]) -> None:
    table = table_of(8, **parts)
    write(table, 6)
    assert RankDraw.make(table, 0, DrawTerms(4, 2, PLAIN), rng=rng()) is None
    write(table, 2)
    for step in range(3):
        made = RankDraw.make(table, step, DrawTerms(4, 2, PLAIN), rng=rng())
        assert made is not None
        made.draw.deal()
        plans = [plan_share(table, made.draw, rank) for rank in (0, 1)]
        assert sorted(np.concatenate([plan.rows for plan in plans]).tolist()) == list(range(8))
    assert table.totals.num_samples == 24


def test_make_when_of_a_column_then_each_share_has_its_part() -> None:
    table = table_of(8, sampler=Prioritized())
    write(table, 8, priorities=np.arange(1.0, 9.0))
    made = RankDraw.make(table, 0, DrawTerms(4, 2, PLAIN), rng=rng())
    assert made is not None
    made.draw.deal()
    for rank in (0, 1):
        plan = plan_share(table, made.draw, rank)
        assert plan.columns["priority"].tolist() == (plan.rows + 1.0).tolist()


def test_make_when_of_groups_then_whole_and_different() -> None:
    table = table_of(8)
    write(table, 8, groups={"g": np.arange(8) // 2})
    terms = DrawTerms(4, 2, SampleConditions(group="g", group_size=2))
    made = RankDraw.make(table, 0, terms, rng=rng())
    assert made is not None
    assert sorted((made.draw.rows[::2] // 2).tolist()) == [0, 1, 2, 3]
    assert ((made.draw.rows[1::2] - made.draw.rows[::2]) == 1).all()


def test_make_when_a_limiter_counts_samples_then_the_draw_counts_once() -> None:
    table = table_of(8, limiter=SampleToInsertRatio(1.0, min_size=1, error_buffer=4.0))
    write(table, 4)
    made = RankDraw.make(table, 0, DrawTerms(2, 4, PLAIN), rng=rng())
    assert made is None
    made = RankDraw.make(table, 0, DrawTerms(2, 2, PLAIN), rng=rng())
    assert made is not None
    made.draw.deal()
    for rank in (0, 1, 1, 0):
        plan_share(table, made.draw, rank)
    assert table.counts.samples == 4


def test_undo_when_made_then_as_before() -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 8)
    made = RankDraw.make(table, 0, DrawTerms(4, 2, PLAIN), rng=rng())
    assert made is not None
    assert len(table) == 0
    made.undo()
    assert (len(table), table.totals.num_samples, len(table.ring.pins)) == (8, 0, 0)
    assert RankDraw.make(table, 0, DrawTerms(4, 2, PLAIN), rng=rng()) is not None


@pytest.mark.parametrize(
    ("parts", "terms", "argument", "reason"),
    [
        ({}, DrawTerms(5, 2, PLAIN), "num_rows", "more than 8 different rows"),
        ({}, DrawTerms(MAX_DRAWN_ROWS, 2, PLAIN), "num_rows", "different rows"),
        ({}, DrawTerms(3, 2, SampleConditions(group="g", group_size=2)), "num_rows", "whole number of groups of 2"),
        ({"sampler": Slices(slice_len=2)}, DrawTerms(2, 2, PLAIN), "rank", "slices"),
    ],
)
def test_make_when_impossible_then_refused(parts: dict[str, Any], terms: DrawTerms, argument: str, reason: str) -> None:
    table = table_of(8, **parts)
    write(table, 8)
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        RankDraw.make(table, 0, terms, rng=rng())
    assert raised.value.argument == argument


def test_kept_when_a_consumer_has_had_rows_of_draws_then_described_for_it_alone() -> None:
    table = table_of(8, limiter=Queue(8), consumers=("judge", "trainer"))
    write(table, 8)
    assert table.samples.describe_kept("trainer") == ""
    made = RankDraw.make(table, 0, DrawTerms(3, 2, SampleConditions(consumer="trainer")), rng=rng())
    assert made is not None
    made.settle()
    kept = "6 that 'trainer' has had are kept for the ranks of a step"
    assert table.samples.describe_kept("trainer") == kept
    assert kept in table.samples.explain_sample(4, SampleConditions(consumer="trainer"))
    assert table.samples.describe_kept("trainer", max_rows=4).startswith("at least 4 that")
    assert table.samples.describe_kept("judge") == table.samples.describe_kept("stranger") == ""
    assert kept not in table.samples.explain_sample(4, PLAIN)
    delete(table, made.draw.rows[:2])
    assert table.samples.describe_kept("trainer").startswith("4 that 'trainer'")
    table.draws.forget_all(table.state)
    assert table.samples.describe_kept("trainer") == ""
