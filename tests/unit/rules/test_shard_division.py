"""A sample is divided among shards as one draw from all of them would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import EndOfStreamError
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tdserve.rules.shard_division import (
    KnownMasses,
    ShardMass,
    check_not_final,
    divide,
    divide_among_ranks,
    divide_sample,
    explain_shortage,
)
from tests import chi_square


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_divide_when_draws_are_independent_then_in_proportion(rng: np.random.Generator) -> None:
    counts = np.zeros(3, np.int64)
    for _ in range(500):
        for shard, count in divide(8, {0: 0.5, 1: 1.5, 2: 6.0, 3: 0.0}, rng).items():
            counts[shard] += count
    assert counts.sum() == 4000
    assert chi_square.statistic(counts, np.array([0.5, 1.5, 6.0]) / 8) < chi_square.limit(3)


def test_divide_when_nothing_comes_twice_then_no_shard_gives_more_than_it_has(rng: np.random.Generator) -> None:
    for _ in range(200):
        counts = divide(9, {0: 1.0, 1: 2.0, 2: 7.0}, rng, is_distinct=True)
        assert sum(counts.values()) == 9
        assert counts.get(0, 0) <= 1
        assert counts.get(1, 0) <= 2
    assert divide(10, {0: 1.0, 1: 2.0, 2: 7.0}, rng, is_distinct=True) == {0: 1, 1: 2, 2: 7}


def test_divide_when_an_epoch_ends_then_the_rest_comes_from_the_next(rng: np.random.Generator) -> None:
    for _ in range(200):
        counts = divide(6, {0: 2.0, 1: 0.0}, rng, is_distinct=True, reserves={0: 3.0, 1: 5.0})
        assert sum(counts.values()) == 6
        assert 2 <= counts[0] <= 5
        assert counts.get(1, 0) <= 5


def test_divide_when_there_are_billions_then_in_proportion_and_each_once(rng: np.random.Generator) -> None:
    masses, counts = {0: 6e8, 1: 0.0, 2: 1.8e9, 3: 3.0}, np.zeros(4, np.int64)
    for _ in range(20):
        for shard, count in divide(200, masses, rng, is_distinct=True).items():
            counts[shard] += count
    assert counts[1] == 0
    assert counts[3] <= 20 * 3
    assert chi_square.statistic(counts[[0, 2]], np.array([0.25, 0.75])) < chi_square.limit(2)
    filled = divide(7, {0: 4.0, 1: 0.0}, rng, is_distinct=True, reserves={0: 5.0, 1: 2e9})
    assert (filled[0] >= 4, sum(filled.values())) == (True, 7)


def mass(mass: float, num_rows: int = 10, num_epochs: int = 0) -> ShardMass:
    """What a shard answers."""
    return ShardMass(mass, 1.0, num_epochs, num_rows, False, num_rows, num_rows)


def test_known_masses_when_too_old_or_of_a_lost_shard_then_asked_again() -> None:
    known, masses = KnownMasses(fresh_s=0.05), {0: mass(1.0), 1: mass(2.0)}
    assert known.find("all", [0, 1], 5.0) is None
    known.note("all", masses, 5.0)
    assert known.find("all", [0, 1, 2], 5.05) == masses
    assert known.find("few", [0, 1], 5.0) is None
    assert known.find("all", [0, 1], 5.06) is None
    assert known.find("all", [0], 5.0) is None
    known.forget()
    assert known.find("all", [0, 1], 5.0) is None


def test_divide_sample_when_all_shards_together_lack_rows_then_none(rng: np.random.Generator) -> None:
    settings = Settings(limiter=MinSize(21))
    assert divide_sample(settings, {0: mass(10.0), 1: mass(10.0)}, 4, rng) is None
    found = divide_sample(settings, {0: mass(10.0), 1: mass(11.0, num_rows=11)}, 4, rng)
    assert found is not None
    assert sum(found.values()) == 4


@pytest.mark.parametrize("limit", [None, 4])
def test_divide_sample_when_fewer_rows_suffice_then_all_that_are_there(
    rng: np.random.Generator, limit: int | None
) -> None:
    masses, limits = {0: mass(3.0, 3), 1: mass(7.0, 7)}, {} if limit is None else {1: limit}
    taken: dict[str, Any] = {"is_lease": True, "limits": limits}
    assert divide_sample(Settings(), masses, 12, rng, **taken) is None
    assert divide_sample(Settings(), masses, 12, rng, takes_fewer=True, **taken) == {0: 3, 1: limit or 7}
    assert divide_sample(Settings(), {0: mass(0.0, 0)}, 12, rng, takes_fewer=True, **taken) is None


def test_divide_sample_when_a_lease_goes_by_priority_then_weights_are_no_numbers_of_rows(
    rng: np.random.Generator,
) -> None:
    settings, masses = Settings(sampler=Prioritized()), {0: mass(0.3, 30), 1: mass(900.0, 9)}
    found = divide_sample(settings, masses, 20, rng, is_lease=True)
    assert found is not None
    assert sum(found.values()) == 20
    assert found[1] == 9
    assert divide_sample(settings, masses, 39, rng, is_lease=True) == {0: 30, 1: 9}
    assert divide_sample(settings, masses, 40, rng, is_lease=True) is None


def test_divide_sample_when_rows_come_in_units_then_each_shard_gives_whole_ones(rng: np.random.Generator) -> None:
    for _ in range(50):
        found = divide_sample(Settings(), {0: mass(3.0), 1: mass(4.0)}, 12, rng, unit=3, is_grouped=True)
        assert found is not None
        assert sum(found.values()) == 12
        assert all(count % 3 == 0 for count in found.values())
    assert divide_sample(Settings(), {0: mass(1.0), 1: mass(2.0)}, 12, rng, unit=3, is_grouped=True) is None


def test_divide_sample_when_rows_leave_after_a_draw_then_no_shard_gives_more_than_it_has(
    rng: np.random.Generator,
) -> None:
    masses = {0: mass(3.0, num_rows=3), 1: mass(4.0, num_rows=4), 2: mass(3.0, num_rows=3)}
    for settings in (Settings(max_times_sampled=1), Settings(Prioritized(), max_times_sampled=2)):
        assert divide_sample(settings, masses, 10, rng) == {0: 3, 1: 4, 2: 3}
        for _ in range(50):
            found = divide_sample(settings, masses, 8, rng, limits={1: 2})
            assert found is not None
            assert sum(found.values()) == 8
            assert all(found.get(shard, 0) <= most for shard, most in {0: 3, 1: 2, 2: 3}.items())
        assert divide_sample(settings, masses, 9, rng, limits={1: 2}) is None


def test_divide_sample_when_rows_of_final_shards_have_few_draws_left_then_no_more_than_these(
    rng: np.random.Generator,
) -> None:
    settings = Settings(Prioritized(), max_times_sampled=3)
    left = {0: mass(2.0, num_rows=2), 1: mass(1.0, num_rows=1)}
    masses = {shard: left[shard]._replace(is_final=True, num_draws=num_draws) for shard, num_draws in ((0, 4), (1, 1))}
    assert divide_sample(settings, masses, 5, rng) == {0: 4, 1: 1}
    assert divide_sample(settings, masses, 6, rng) is None


def test_divide_sample_when_rows_may_be_drawn_twice_then_a_sample_may_be_larger_than_the_table(
    rng: np.random.Generator,
) -> None:
    found = divide_sample(Settings(max_times_sampled=2), {0: mass(3.0, num_rows=3), 1: mass(4.0, num_rows=4)}, 14, rng)
    assert found == {0: 6, 1: 8}


def test_divide_sample_when_an_epoch_has_ended_in_a_shard_then_all_of_its_rows_are_due(
    rng: np.random.Generator,
) -> None:
    settings = Settings(sampler=WithoutReplacement())
    masses = {0: mass(4.0, num_epochs=2), 1: mass(0.0, num_epochs=1)}
    assert divide_sample(settings, masses, 14, rng) == {0: 4, 1: 10}


def drawable(mass: float, num_drawable: int, num_epochs: int = 0) -> ShardMass:
    """What a shard of 20 rows answers, of which not all may be drawn."""
    return ShardMass(mass, 1.0, num_epochs, num_drawable, False, 20, 20)


@pytest.mark.parametrize("is_lease", [False, True])
def test_divide_sample_when_an_epoch_is_over_then_of_the_rows_that_may_be_drawn_alone(
    rng: np.random.Generator, *, is_lease: bool
) -> None:
    settings = Settings(WithoutReplacement())
    new = {0: drawable(0.0, 5), 1: drawable(0.0, 3)}
    begun = {0: drawable(2.0, 5, 1), 1: drawable(0.0, 3)}  # of shard 1 all are due
    for masses in (new, begun):
        assert divide_sample(settings, masses, 8, rng, is_lease=is_lease) == {0: 5, 1: 3}
        assert divide_sample(settings, masses, 6, rng, is_lease=is_lease, limits={0: 3}) == {0: 3, 1: 3}
        assert divide_sample(settings, masses, 7, rng, is_lease=is_lease, limits={0: 3}) is None
        assert divide_sample(settings, masses, 9, rng, is_lease=is_lease) is None
    assert divide_sample(settings, begun, 5, rng, is_lease=is_lease) == {0: 2, 1: 3}
    nothing = {0: drawable(0.0, 0, 1), 1: drawable(0.0, 0)}
    assert divide_sample(settings, nothing, 1, rng, is_lease=is_lease) is None


def test_divide_sample_when_the_table_is_closed_then_its_limiter_keeps_no_rows_from_a_lease(
    rng: np.random.Generator,
) -> None:
    settings, masses = Settings(limiter=MinSize(50)), {0: drawable(5.0, 5), 1: drawable(3.0, 3)}
    assert divide_sample(settings, masses, 9, rng, is_lease=True, takes_fewer=True) is None
    assert divide_sample(settings, masses, 9, rng, is_lease=True, takes_fewer=True, is_closed=True) == {0: 5, 1: 3}
    found = divide_sample(settings, masses, 4, rng, is_lease=True, takes_fewer=True, is_closed=True)
    assert found is not None
    assert sum(found.values()) == 4
    assert divide_sample(settings, masses, 4, rng, is_closed=True) is None


def test_divide_among_ranks_when_not_all_rows_may_be_drawn_then_those_alone_count(rng: np.random.Generator) -> None:
    masses = {0: drawable(11.0, 11), 1: drawable(7.0, 7), 2: drawable(0.0, 0)}
    assert divide_among_ranks(Settings(), masses, 8, 2, rng) == {0: 5, 1: 3}
    assert divide_among_ranks(Settings(), masses, 9, 2, rng) is None
    for _ in range(50):
        found = divide_among_ranks(Settings(), masses, 5, 2, rng)
        assert found is not None
        assert sum(found.values()) == 5
        assert found.get(1, 0) <= 3
    assert divide_among_ranks(Settings(limiter=MinSize(61)), masses, 1, 2, rng) is None
    nothing = {0: drawable(0.0, 0), 1: drawable(0.0, 0)}
    assert divide_among_ranks(Settings(), nothing, 1, 1, rng) is None


def test_divide_among_ranks_when_of_groups_then_as_many_whole_ones_for_each(rng: np.random.Generator) -> None:
    masses = {0: drawable(5.0, 20), 1: drawable(2.0, 8)}  # groups, and rows of them
    for sampler in (Uniform(), WithoutReplacement(), Prioritized()):
        found = divide_among_ranks(Settings(sampler), masses, 12, 2, rng, unit=4, is_grouped=True)
        assert found == {0: 8, 1: 4}
        assert divide_among_ranks(Settings(sampler), masses, 16, 2, rng, unit=4, is_grouped=True) is None


def test_divide_among_ranks_when_prioritized_then_by_weight_up_to_the_rows_of_each(rng: np.random.Generator) -> None:
    settings, masses = Settings(Prioritized()), {0: drawable(0.3, 12), 1: drawable(900.0, 9)}
    for _ in range(50):
        assert divide_among_ranks(settings, masses, 6, 2, rng) == {0: 2, 1: 4}
    assert divide_among_ranks(settings, masses, 11, 2, rng) is None


def test_divide_among_ranks_when_an_epoch_ends_then_the_rest_comes_from_the_next(rng: np.random.Generator) -> None:
    settings = Settings(WithoutReplacement())
    ended = {0: drawable(0.0, 8, 1), 1: drawable(0.0, 6, 1)}
    assert divide_among_ranks(settings, ended, 7, 2, rng) == {0: 4, 1: 3}
    ends_in_one = {0: drawable(4.0, 8, 2), 1: drawable(0.0, 6, 1)}
    assert divide_among_ranks(settings, ends_in_one, 5, 2, rng) == {0: 2, 1: 3}


@pytest.mark.parametrize(
    ("settings", "conditions", "why"),
    [
        (Settings(limiter=MinSize(30)), ["have 'a'"], "and MinSize(min_size=30) needs more"),
        (Settings(), ["have 'a'", "are not on lease"], "of which too few have 'a' and are not on lease"),
        (Settings(), [], "too few of which can be drawn now"),
    ],
)
def test_explain_shortage_when_asked_then_names_the_rows_of_each_shard_and_what_they_lack(
    settings: Settings, conditions: list[str], why: str
) -> None:
    masses = {1: mass(0.0, num_rows=7), 0: mass(5.0)}
    shown = explain_shortage(settings, masses, conditions, servers=[3, 4])
    assert shown == f"it has 17 live rows (10 at shard 0, 7 at shard 1), {why}"
    masses[1] = masses[1]._replace(missing="'b' is missing in 7")
    assert explain_shortage(settings, masses, conditions, servers=[3, 4]) == f"{shown} (at shard 1 'b' is missing in 7)"
    del masses[1]
    shown = explain_shortage(settings, masses, conditions, servers=[3, 4])
    assert "it has 10 live rows (10 at shard 0, no answer from shard 1 at server 4)" in shown


@pytest.mark.parametrize(
    ("num_needed", "unit", "need"),
    [
        (9, 1, ", where 9 are needed"),
        (8, 1, ""),
        (12, 4, ", where 12 are needed"),
        (8, 4, ", where 8 are needed, as many of each shard for each rank"),
        (4, 4, ""),
    ],
)
def test_check_not_final_when_no_shard_has_rows_later_then_the_end_names_what_is_needed(
    num_needed: int, unit: int, need: str
) -> None:
    masses = {0: drawable(5.0, 5)._replace(is_final=True), 1: drawable(3.0, 3)}
    check_not_final("t", masses, 2, num_needed=num_needed, unit=unit)
    masses[1] = masses[1]._replace(is_final=True)
    check_not_final("t", masses, 3, num_needed=num_needed, unit=unit)
    with pytest.raises(EndOfStreamError) as caught:
        check_not_final("t", masses, 2, num_needed=num_needed, unit=unit)
    assert str(caught.value) == f"'t' is closed, and 8 rows are left to draw{need}"
