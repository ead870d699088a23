"""Rows that are handed out for good: on lease, from a closed table, or for the last time."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import (
    EndOfStreamError,
    InvalidRequestError,
    SelectionError,
    WrongStateError,
)
from tdserve.messages.row_numbers import PIECE_ROWS, RUN_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.eligibility.conditions import PLAIN, SampleConditions
from tdserve.rules.replay.limiter import SampleToInsertRatio
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Sampler, Uniform
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tests.unit.rules.replay.tables import (
    acknowledge,
    clear,
    delete,
    give_back,
    more,
    numbers,
    planned,
    queue,
    rng,
    table_of,
    write,
)

CLOSED_EMPTY = r"^'replay' is closed, and 0 rows are left"


def test_take_when_acknowledged_then_consumed_and_else_at_the_front_again() -> None:
    table = queue()
    assert write(table, 4) == [0, 1, 2, 3]
    assert planned(table, 2, owner=7).rows.tolist() == [0, 1]
    assert planned(table, 1, owner=8).rows.tolist() == [2]
    assert acknowledge(table, 7, "", numbers(1, 1)) == 1
    give_back(table, 7, "", numbers(0))
    assert planned(table, 2, owner=8).rows.tolist() == [0, 3]
    assert sum(table.selectors.release_in_pieces(8))
    assert planned(table, 3, owner=9).rows.tolist() == [0, 2, 3]
    assert acknowledge(table, 9, "", numbers(0, 2, 3)) == 3
    assert (len(table), table.ring.num_holes) == (0, 4)


@pytest.mark.parametrize("consumer", ["", "trainer"])
def test_lease_when_the_owner_has_taken_its_rows_again_then_its_end_leaves_them_alone(consumer: str) -> None:
    table = queue() if not consumer else table_of()
    write(table, 1)
    conditions = SampleConditions(None, consumer)
    assert planned(table, 1, owner=7, request=1, conditions=conditions).rows.tolist() == [0]
    assert sum(table.selectors.release_in_pieces(7, request=1))
    assert planned(table, 1, owner=7, request=2, conditions=conditions).rows.tolist() == [0]
    give_back(table, 7, consumer, numbers(0), request=1)
    assert table.selectors.leases.num_leased == 1
    with pytest.raises(WrongStateError):
        acknowledge(table, 7, consumer, numbers(0), request=1)
    assert table.selectors.leases.num_leased == 1
    assert acknowledge(table, 7, consumer, numbers(0), request=2) == 1
    assert table.selectors.leases.num_leased == 0


def test_take_when_fewer_rows_suffice_then_as_many_as_are_there() -> None:
    table = queue()
    write(table, 3)
    assert table.samples.draw_sample(4, rng=rng(), owner=7, min_rows=4) is None
    assert planned(table, 4, owner=7, min_rows=2).rows.tolist() == [0, 1, 2]
    assert table.samples.draw_sample(4, rng=rng(), owner=8, min_rows=1) is None
    give_back(table, 7, "", numbers(1))
    assert planned(table, 4, owner=8, min_rows=1).rows.tolist() == [1]


def test_take_when_the_limiter_allows_fewer_then_as_many_as_it_allows() -> None:
    table = table_of(8, limiter=SampleToInsertRatio(1.0, min_size=3, error_buffer=1.0))
    write(table, 4)
    assert len(planned(table, 8, owner=7, min_rows=1).rows) == 2


def test_extend_when_the_queue_is_full_then_rows_on_lease_still_take_room() -> None:
    table = queue()
    write(table, 4)
    plan = planned(table, 2, owner=7)
    assert table.arrivals.reserve(1) is None
    assert "max_size=4" in table.arrivals.explain_extend(1)
    acknowledge(table, 7, "", plan.rows)
    assert table.arrivals.reserve(3) is None
    assert table.arrivals.reserve(2) is not None


@pytest.mark.parametrize("named", [(2,), (0, 3), (-1,), (0, -4), (4,), (2**40,)])
def test_acknowledge_when_rows_are_not_the_callers_then_refused_and_nothing_changes(named: tuple[int, ...]) -> None:
    table = queue()
    write(table, 4)
    planned(table, 2, owner=7)
    planned(table, 2, owner=8)  # all rows of the table are somebody's
    with pytest.raises((WrongStateError, SelectionError)):
        acknowledge(table, 7, "", numbers(*named))
    with pytest.raises((WrongStateError, SelectionError)):
        acknowledge(table, 8, "", numbers(-1))
    assert table.state.list_live_rows().tolist() == [0, 1, 2, 3]
    assert table.info()["num_leased"] == 4


def test_give_back_when_some_rows_are_not_the_callers_then_only_its_own_are_free() -> None:
    table = queue()
    write(table, 4)
    planned(table, 2, owner=7)
    planned(table, 2, owner=8)
    give_back(table, 7, "", numbers(1, 2, 3))
    assert table.selectors.leases.is_leased(np.arange(4), "").tolist() == [True, False, True, True]
    assert planned(table, 1, owner=9).rows.tolist() == [1]


@pytest.mark.parametrize("named", [(-1,), (0, -4), (4,), (2**40,)])
def test_give_back_when_a_number_is_none_of_a_row_then_refused_and_nothing_changes(named: tuple[int, ...]) -> None:
    table = queue()
    write(table, 4)
    planned(table, 2, owner=7)
    with pytest.raises(SelectionError):
        give_back(table, 7, "", numbers(*named))
    assert table.info()["num_leased"] == 2


def test_closed_when_drained_then_takers_get_what_is_left_and_then_the_end() -> None:
    table = queue()
    write(table, 3)
    table.close()
    with pytest.raises(WrongStateError, match="closed"):
        table.arrivals.reserve(1)
    first = planned(table, 2, owner=7)
    last = planned(table, 2, 3, owner=8)
    assert (first.rows.tolist(), last.rows.tolist()) == ([0, 1], [2])
    assert table.samples.draw_sample(1, rng=rng(), owner=9) is None  # a row may come back
    acknowledge(table, 8, "", last.rows)
    assert sum(table.selectors.release_in_pieces(7))
    again = planned(table, 5 - 1, owner=9)
    assert again.rows.tolist() == [0, 1]
    acknowledge(table, 9, "", again.rows)
    with pytest.raises(EndOfStreamError, match=CLOSED_EMPTY):
        table.samples.draw_sample(1, rng=rng(), owner=9)


def test_closed_when_a_consumer_has_had_all_then_the_end_for_it_alone() -> None:
    table = table_of()
    write(table, 3)
    conditions, other = SampleConditions(consumer="a"), SampleConditions(consumer="b")
    acknowledge(table, 1, "a", planned(table, 3, conditions=conditions, owner=1).rows)
    assert table.samples.draw_sample(1, rng=rng(), conditions=conditions, owner=1) is None
    table.close()
    with pytest.raises(EndOfStreamError, match=CLOSED_EMPTY):
        table.samples.draw_sample(1, rng=rng(), conditions=conditions, owner=1)
    assert len(planned(table, 5, conditions=other, owner=1).rows) == 3


def test_closed_when_rows_lack_leaves_then_the_end_comes_once_none_of_them_can_be_drawn() -> None:
    capacity = 2 * RUN_PIECE_ROWS + 3
    table = table_of(capacity)
    write(table, capacity - 2)
    first, second = write(table, 2, keys=(0,))
    table.close()
    judge, trainer = SampleConditions((0,), "judge"), SampleConditions(None, "trainer")
    for conditions, num_rows in ((judge, capacity), (trainer, capacity - 2)):
        plan = planned(table, num_rows, conditions=conditions, owner=1)
        acknowledge(table, 1, conditions.consumer, plan.rows)
    with pytest.raises(EndOfStreamError):  # it needs no leaf that is missing
        table.samples.draw_sample(1, rng=rng(), conditions=judge, owner=1)
    for row in (second, first):
        assert table.samples.draw_sample(1, rng=rng(), conditions=trainer, owner=1) is None
        table.selectors.note_written(numbers(row), (1,))
        table.selectors.suspend(numbers(row))
        table.selectors.enter(numbers(row))
        acknowledge(table, 1, "trainer", planned(table, 1, conditions=trainer, owner=1).rows)
    with pytest.raises(EndOfStreamError):
        table.samples.draw_sample(1, rng=rng(), conditions=trainer, owner=1)


@pytest.mark.parametrize(("sampler", "is_over"), [(Uniform(), True), (Prioritized(eps=0), False)])
def test_closed_when_a_sample_finds_too_few_rows_then_the_end_unless_a_priority_may_come(
    sampler: Sampler, is_over: bool
) -> None:
    table = table_of(8, sampler=sampler, max_times_sampled=1)
    write(table, 1, priorities=np.zeros(1))
    table.close()
    if is_over:
        with pytest.raises(EndOfStreamError, match=r"1 rows are left to draw, where 2 are needed$"):
            table.samples.draw_sample(2, rng=rng())
        assert table.samples.draw_sample(2, 3, rng=rng()) is None  # of several batches, one may be drawn
    else:
        assert table.samples.draw_sample(2, rng=rng()) is None


def test_closed_when_groups_are_taken_then_whole_ones_and_then_the_end() -> None:
    table = table_of()
    conditions = SampleConditions(group="g", group_size=2)
    write(table, 5, groups={"g": numbers(1, 2, 1, 2, 3)})
    table.close()
    plan = planned(table, 6, conditions=conditions, owner=1)
    assert set(map(tuple, plan.rows.reshape(-1, 2).tolist())) == {(0, 2), (1, 3)}
    acknowledge(table, 1, "", plan.rows)
    with pytest.raises(EndOfStreamError):  # the third group will never be whole
        table.samples.draw_sample(2, rng=rng(), conditions=conditions, owner=1)


def test_max_times_when_a_sample_was_sent_then_its_rows_go_and_else_they_come_back() -> None:
    table = table_of(4, max_times_sampled=1, sampler=Fifo())
    write(table, 4)
    failed, sent = planned(table, 2), planned(table, 1)
    assert (failed.rows.tolist(), sent.rows.tolist()) == ([0, 1], [2])
    assert len(table) == 4  # none goes before it was sent
    assert table.samples.finish(sent)
    table.samples.undo(failed)
    assert table.state.list_live_rows().tolist() == [0, 1, 3]
    assert table.counts.samples == 1
    assert planned(table, 3).rows.tolist() == [0, 1, 3]


def test_max_times_when_the_row_was_overwritten_meanwhile_then_the_new_one_is_untouched() -> None:
    for ends in ("finish", "undo"):
        table = table_of(2, max_times_sampled=1, sampler=Fifo())
        write(table, 2)
        plan = planned(table, 2)
        assert write(table, 1) == [0]
        getattr(table.samples, ends)(plan)
        assert table.columns.times_sampled[0] == 0
        assert 0 in table.state.list_live_rows()
        assert 0 in planned(table, len(table)).rows


def test_undo_when_the_row_was_overwritten_meanwhile_then_the_new_one_was_never_sampled() -> None:
    table = table_of(2, sampler=Prioritized())
    write(table, 2)
    plan = planned(table, 8)
    write(table, 2)
    table.samples.undo(plan)
    assert table.columns.times_sampled.tolist() == [0, 0]


@pytest.mark.parametrize("ends", ["finish", "undo"])
def test_max_times_when_a_row_is_on_its_way_out_then_writes_to_it_are_refused_and_a_clear_has_it(ends: str) -> None:
    table = table_of(4, max_times_sampled=1, sampler=Fifo())
    write(table, 2)
    plan = planned(table, 1)
    with pytest.raises(SelectionError, match="not live"):
        table.state.hold(numbers(0, 1))
    with pytest.raises(SelectionError):
        delete(table, numbers(0))
    assert clear(table) == 2
    getattr(table.samples, ends)(plan)
    assert table.state.list_live_rows().tolist() == []
    assert len(table.selectors.get(PLAIN)) == len(table) == 0


def test_undo_when_rows_were_on_lease_then_others_have_them() -> None:
    table = queue()
    write(table, 3)
    plan = planned(table, 2, owner=7)
    table.samples.undo(plan)
    assert planned(table, 3, owner=8).rows.tolist() == [0, 1, 2]
    table.samples.undo(plan)  # its session has ended, and others hold the rows now
    assert table.info()["num_leased"] == 3


def test_draw_more_when_rows_are_taken_in_parts_then_other_takers_wait_and_all_or_none_are_leased() -> None:
    table = queue(8)
    write(table, 8)
    parts = [planned(table, 6, owner=1, request=5, max_drawn=2)]
    assert table.counts.samples == 6
    assert table.samples.draw_sample(1, rng=rng(), owner=2) is None
    parts.append(more(table, parts[0], 2))
    parts.append(more(table, parts[1], 2))
    assert np.concatenate([part.rows for part in parts]).tolist() == [0, 1, 2, 3, 4, 5]
    assert [part.num_missing for part in parts] == [4, 2, 0]
    assert planned(table, 2, owner=2).rows.tolist() == [6, 7]
    assert acknowledge(table, 1, "", numbers(0)) == 1
    assert sum(table.selectors.release_in_pieces(1, request=5)) == 5


@pytest.mark.parametrize("consumer", ["", "a"])
def test_acknowledge_when_in_parts_then_all_are_looked_at_first_and_others_come_in_between(consumer: str) -> None:
    num_rows = 2 * PIECE_ROWS + 10
    table = table_of(num_rows, sampler=Fifo())
    write(table, num_rows)
    conditions = SampleConditions(consumer=consumer)
    held = planned(table, num_rows - 5, owner=7, conditions=conditions).rows
    for named in (np.append(held, num_rows - 1), np.arange(num_rows)):
        if not consumer:
            with pytest.raises(WrongStateError, match="are not held by this owner"):
                acknowledge(table, 7, consumer, named)
    with pytest.raises(SelectionError):
        give_back(table, 7, consumer, np.append(held, num_rows))
    assert table.info()["num_leased"] == num_rows - 5
    parts = list(table.leases.find_acknowledged_in_parts(7, consumer, held, None))
    assert table.info()["num_leased"] == num_rows - 5
    departure = table.departures.plan_departure(RowSet.from_rows(np.concatenate(parts)), consumer)
    departing = table.departures.depart_in_pieces(departure, owner=7)
    next(departing)
    delete(table, held[-2:])
    assert planned(table, 2, owner=8, conditions=conditions).rows.tolist() == [num_rows - 5, num_rows - 4]
    assert sum(departing) > PIECE_ROWS // 2
    assert table.info()["num_leased"] == 2
    assert len(table) == (5 if not consumer else num_rows - 2)
    assert planned(table, 3, owner=8, conditions=conditions).rows.tolist() == [num_rows - 3, num_rows - 2, num_rows - 1]


def test_draw_more_when_rows_have_left_meanwhile_then_none_and_undone_the_next_taker_gets_them() -> None:
    table = queue(8)
    write(table, 8)
    parts = [planned(table, 7, owner=1, max_drawn=2)]
    parts.append(more(table, parts[0], 2))
    delete(table, numbers(5, 6))
    assert table.samples.draw_more(parts[1], 2, rng=rng()) is None
    assert table.samples.draw_sample(1, rng=rng(), owner=2) is None
    for _ in table.samples.undo_in_parts(parts):
        pass
    assert (table.counts.samples, table.info()["num_leased"]) == (0, 0)
    assert planned(table, 6, owner=2).rows.tolist() == [0, 1, 2, 3, 4, 7]


@pytest.mark.parametrize("sampler", [Fifo(), Lifo(), WithoutReplacement()], ids=lambda sampler: sampler.kind)
def test_draw_more_when_rows_must_differ_then_they_do_and_batches_are_as_if_drawn_at_once(sampler: Sampler) -> None:
    table = table_of(8, sampler=sampler)
    write(table, 6)
    plan = planned(table, 5, 2, max_drawn=2)
    rows = plan.rows.tolist()
    assert table.samples.draw_sample(1, rng=rng()) is None
    while plan.num_missing:
        if len(rows) == 2:  # the newest one, and another in the place of the oldest that was not drawn yet
            write(table, 1)
        plan = more(table, plan, 2)
        rows += plan.rows.tolist()
    assert [len(set(rows[:5])), len(set(rows[5:]))] == [5, 5]
    if sampler.kind == "lifo":
        assert rows == [5, 4, 3, 2, 1, 6, 5, 4, 3, 2]
    if sampler.kind == "fifo":
        assert rows == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert table.counts.samples == 10
    assert len(planned(table, 1).rows) == 1


def test_draw_more_when_groups_or_slices_come_in_parts_then_each_is_whole() -> None:
    table = table_of(12)
    write(table, 12, groups={"g": numbers(*range(4)).repeat(3)})
    conditions = SampleConditions(group="g", group_size=3)
    parts = [planned(table, 12, conditions=conditions, max_drawn=4)]
    while parts[-1].num_missing:
        parts.append(more(table, parts[-1], 4))
    found = np.concatenate([part.rows for part in parts]).reshape(-1, 3)
    assert sorted(found.tolist()) == np.arange(12).reshape(-1, 3).tolist()
    for slices in (Slices(slice_len=3), Slices(num_slices=4)):
        table = table_of(12, sampler=slices)
        write(table, 12)
        parts = [planned(table, 12, max_drawn=4)]
        assert table.samples.draw_sample(12, rng=rng()) is not None  # slices may overlap: nobody waits
        while parts[-1].num_missing:
            parts.append(more(table, parts[-1], 4))
        assert [len(part.rows) for part in parts] == [3, 3, 3, 3]
        assert all((np.diff(part.rows) == 1).all() for part in parts)


def test_draw_more_when_slices_are_shorter_then_they_count_as_they_are() -> None:
    table = table_of(12, sampler=Slices(slice_len=3, strict_length=False))
    write(table, 2, ends=np.array([False, True]))
    parts = [planned(table, 9, max_drawn=4)]
    assert table.counts.samples == 2 + 6
    while parts[-1].num_missing:
        parts.append(more(table, parts[-1], 4))
    assert table.counts.samples == sum(len(part.rows) for part in parts) == 6
    for _ in table.samples.undo_in_parts(parts):
        pass
    assert table.counts.samples == 0


def test_take_when_rows_belong_together_then_refused() -> None:
    table = table_of(sampler=Slices(slice_len=2))
    write(table, 4, writer="w")
    with pytest.raises(InvalidRequestError, match="slices"):
        table.samples.draw_sample(2, rng=rng(), owner=1)
    assert table.info()["num_leased"] == 0


def test_take_when_rows_leave_after_some_samples_then_refused() -> None:
    table = table_of(max_times_sampled=1)  # they would be gone before anybody could acknowledge them
    write(table, 3)
    with pytest.raises(InvalidRequestError, match="max_times_sampled"):
        table.samples.draw_sample(2, rng=rng(), conditions=SampleConditions(consumer="a"), owner=1)
    assert table.counts.samples == 0
    assert len(table.selectors.get(PLAIN)) == 3
