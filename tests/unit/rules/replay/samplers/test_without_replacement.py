from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.without_replacement import EpochSelector, WithoutReplacement
from tests import chi_square
from tests.errors import raises


def _selector(num_rows: int, capacity: int = 1000) -> EpochSelector:
    selector = WithoutReplacement().make_selector(RowColumns(capacity), capacity)
    selector.add(np.arange(num_rows))
    return selector


def _draw(selector: EpochSelector, num_rows: int, rng: np.random.Generator) -> Rows:
    drawn = selector.draw(num_rows, rng=rng)
    assert drawn is not None
    assert drawn.columns == {}
    assert len(set(drawn.rows.tolist())) == num_rows
    return drawn.rows


def test_draw_when_four_learners_share_an_epoch_then_each_row_comes_once() -> None:
    selector, rng = _selector(1000), np.random.default_rng(0)
    learners: list[list[int]] = [[], [], [], []]
    while sum(map(len, learners)) < 1000:
        learners[rng.integers(4)].extend(_draw(selector, 8, rng).tolist())
    assert min(map(len, learners)) > 0
    assert sorted(row for rows in learners for row in rows) == list(range(1000))


@pytest.mark.parametrize("num_rows", [1, 3, 7, 10])
def test_draw_when_samples_meet_the_end_of_an_epoch_then_epochs_are_whole_all_the_same(num_rows: int) -> None:
    selector, rng = _selector(10), np.random.default_rng(0)
    drawn = np.concatenate([_draw(selector, num_rows, rng) for _ in range(200)]).reshape(-1, 10)
    assert (np.sort(drawn, axis=1) == np.arange(10)).all()


def _counts_by_place(num_rows: int, num_epochs: int) -> NDArray[np.int64]:
    selector, rng = _selector(8), np.random.default_rng(num_rows)
    drawn = np.concatenate([_draw(selector, num_rows, rng) for _ in range(8 * num_epochs // num_rows)]).reshape(-1, 8)
    places = np.arange(8) * 8
    return np.bincount((drawn + places).reshape(-1), minlength=64).reshape(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_draw_when_seen_by_place_in_the_epoch_then_every_row_is_equally_likely(num_rows: int) -> None:
    for counts in _counts_by_place(num_rows, 4000):
        assert chi_square.statistic(counts) < chi_square.limit(8)


@pytest.mark.slow
def test_draw_when_a_sample_crosses_the_end_then_its_places_are_fair_too() -> None:
    for counts in _counts_by_place(6, 12_000):
        assert chi_square.statistic(counts) < chi_square.limit(8)


@pytest.mark.slow
def test_draw_when_epochs_follow_each_other_then_orders_are_independent() -> None:
    selector, rng = _selector(4), np.random.default_rng(0)
    drawn = np.concatenate([_draw(selector, 1, rng) for _ in range(40_000)]).reshape(-1, 4)
    codes = drawn @ np.array([64, 16, 4, 1])
    seen, orders = np.unique(codes, return_inverse=True)
    assert len(seen) == 24
    pairs = np.bincount(orders[:-1:2] * 24 + orders[1::2], minlength=576)
    assert chi_square.statistic(pairs) < chi_square.limit(576)


def test_draw_when_rows_come_in_mid_epoch_then_they_wait_for_the_next() -> None:
    selector, rng = _selector(10), np.random.default_rng(0)
    first = _draw(selector, 4, rng).tolist()
    selector.add(np.arange(10, 15))
    assert sorted(first + _draw(selector, 6, rng).tolist()) == list(range(10))
    assert sorted(_draw(selector, 15, rng).tolist()) == list(range(15))


def test_draw_when_rows_go_in_mid_epoch_then_they_are_skipped() -> None:
    selector, rng = _selector(10), np.random.default_rng(0)
    first = _draw(selector, 4, rng)
    gone = np.array([first[0], *np.setdiff1d(np.arange(10), first)[:3], 999])
    selector.remove(gone)
    left = np.setdiff1d(np.arange(10), gone)
    assert len(selector) == 6
    assert sorted(_draw(selector, 3, rng).tolist()) == np.setdiff1d(left, first).tolist()
    assert sorted(_draw(selector, 6, rng).tolist()) == left.tolist()


def test_add_when_a_row_is_overwritten_then_it_comes_with_the_next_epoch_and_once() -> None:
    selector, rng = _selector(6), np.random.default_rng(0)
    selector.remove(np.array([2, 3]))
    selector.add(np.array([3, 2]))
    assert repr(selector) == "<EpochSelector 6 rows, 0 of them due>"
    _draw(selector, 6, rng)
    first = _draw(selector, 2, rng)
    selector.remove(first[:1])
    selector.add(first[:1])
    rest = _draw(selector, 4, rng)
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(6))
    assert sorted(_draw(selector, 6, rng).tolist()) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_draw_when_rows_come_and_go_at_random_then_as_two_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    selector, due, other = _selector(0, 60), set[int](), set[int]()
    for _ in range(1500):
        rows = set(rng.choice(60, rng.integers(0, 12), replace=False).tolist())
        action = rng.integers(3)
        if action == 0:
            new = rows - due - other
            selector.add(np.array(list(new), np.int64))
            other |= new
        elif action == 1:
            selector.remove(np.array(list(rows), np.int64))
            due, other = due - rows, other - rows
        elif due | other:
            num_rows = int(rng.integers(1, len(due | other) + 1))
            drawn = _draw(selector, num_rows, rng).tolist()
            now, later = set(drawn[: len(due)]), set(drawn[len(due) :])
            assert now <= due
            due, other = due - now, other | now
            if later:
                assert not due
                assert later <= other
                due, other = other - later, later
        assert len(selector) == len(due) + len(other)
        assert f"{len(due)} of them due" in repr(selector)


def test_draw_when_more_are_asked_than_there_are_then_refused_naming_both() -> None:
    selector, rng = _selector(10), np.random.default_rng(0)
    with pytest.raises(InvalidRequestError, match="11 rows without replacement are more than the 10"):
        selector.draw(11, rng=rng)
    assert len(_draw(selector, 10, rng)) == 10


def test_draw_when_there_are_no_rows_then_none() -> None:
    selector, rng = _selector(3), np.random.default_rng(0)
    selector.remove(np.arange(3))
    assert selector.draw(1, rng=rng) is None
    selector.update(np.arange(3))
    WithoutReplacement().check(1)


def test_add_when_a_row_is_a_member_already_then_our_own_bug() -> None:
    selector = _selector(3)
    with pytest.raises(LocalProtocolError):
        selector.add(np.array([5, 2]))
    assert len(selector) == 3


def test_draw_when_a_seed_is_given_then_the_same_epochs_whatever_the_tables_own_randomness() -> None:
    def epochs(seed: int | None, randomness: int) -> list[int]:
        selector = WithoutReplacement(seed=seed).make_selector(RowColumns(100), 100)
        selector.add(np.arange(100))
        rng = np.random.default_rng(randomness)
        return [row for _ in range(30) for row in _draw(selector, 8, rng).tolist()]

    assert epochs(5, 0) == epochs(5, 1) != epochs(6, 0)
    assert epochs(None, 0) != epochs(None, 1)


@pytest.mark.parametrize("seed", [-1, 1.0, True, "x"])
def test_sampler_when_the_seed_is_no_number_then_refused(seed: object) -> None:
    with raises(InvalidRequestError, argument="seed"):
        WithoutReplacement(seed=seed)  # type: ignore[arg-type]


def test_draw_when_a_sample_comes_in_parts_then_none_twice_over_the_end_of_an_epoch_too() -> None:
    rng = np.random.default_rng(0)
    for seed in range(200):
        selector = _selector(20, 40)
        _draw(selector, 1 + seed % 19, rng)
        drawn = [_draw(selector, 3, rng)]
        for begun in (3, 6, 9, 12):
            if seed % 2:
                selector.remove(rng.choice(20, 1))
                selector.add(np.array([19 + begun // 3]))
            part = selector.draw(3, rng=rng, num_drawn=begun, num_total=15)
            assert part is not None
            drawn.append(part.rows)
        rows = np.concatenate(drawn)
        assert len(set(rows.tolist())) == len(rows) == 15


def test_draw_when_rows_go_between_its_parts_then_none_where_too_few_are_left() -> None:
    selector, rng = _selector(10), np.random.default_rng(0)
    first = selector.draw(4, rng=rng, num_total=10)
    assert first is not None
    selector.remove(np.setdiff1d(np.arange(10), first.rows)[:1])
    assert selector.draw(6, rng=rng, num_drawn=4, num_total=10) is None
    with pytest.raises(InvalidRequestError, match="10 rows without replacement are more than the 9"):
        selector.draw(4, rng=rng, num_total=10)
