from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import (
    CapacityError,
    InvalidRequestError,
    SelectionError,
    WrongStateError,
)
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.eligibility.conditions import OWN, SampleConditions
from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
from tdserve.rules.replay.remover import LowestPriority
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.chi_square import limit, statistic
from tests.unit.rules.replay.tables import (
    delete,
    give_back,
    numbers,
    planned,
    reserve,
    rng,
    small_table,
    table_of,
    write,
)


def test_sample_when_rows_are_reserved_but_not_committed_then_waits() -> None:
    table = small_table()
    reservation = reserve(table, 4)
    assert table.samples.draw_sample(2, rng=rng()) is None
    table.arrivals.commit(reservation)
    plan = table.samples.draw_sample(2, 3, rng=rng())
    assert plan is not None
    assert plan.rows.shape == (6,)
    assert plan.generations.tolist() == [2] * 6
    assert set(plan.rows.tolist()) <= {0, 1, 2, 3}


def test_sample_when_below_min_size_then_waits_and_explains_why() -> None:
    table = small_table(min_size=3)
    table.arrivals.commit(reserve(table, 2))
    assert table.samples.draw_sample(1, rng=rng()) is None
    assert "'replay' (size 2 of 8" in table.samples.explain_sample(1)
    assert "needs a size of 3" in table.samples.explain_sample(1)
    table.arrivals.commit(reserve(table, 1))
    assert table.samples.draw_sample(1, rng=rng()) is not None


def test_sample_when_it_replaces_rows_that_were_counted_then_let_through_and_not_counted() -> None:
    table = table_of(limiter=SampleToInsertRatio(1.0, min_size=1, error_buffer=4))
    write(table, 4)
    planned(table, 4)
    planned(table, 3)
    assert table.samples.draw_sample(2, rng=rng()) is None
    plan = table.samples.draw_sample(2, rng=rng(), replaces=True)
    assert plan is not None
    assert table.counts.samples == 7
    table.samples.undo(plan)
    assert table.counts.samples == 7


def test_sample_when_rows_are_being_overwritten_then_never_gets_them() -> None:
    table = small_table(4)
    table.arrivals.commit(reserve(table, 4))
    reserve(table, 3)
    plan = table.samples.draw_sample(100, rng=rng())
    assert plan is not None
    assert set(plan.rows.tolist()) == {3}


def test_sample_when_every_row_is_being_overwritten_then_waits() -> None:
    table = small_table(4)
    table.arrivals.commit(reserve(table, 4))
    reserve(table, 4)
    assert table.samples.draw_sample(1, rng=rng()) is None


@pytest.mark.parametrize(("num_rows", "num_batches"), [(0, 1), (1, 0), (-1, 1)])
def test_sample_when_nothing_is_asked_then_refused_and_not_counted(num_rows: int, num_batches: int) -> None:
    table = small_table()
    table.arrivals.commit(reserve(table, 4))
    with pytest.raises(InvalidRequestError):
        table.samples.draw_sample(num_rows, num_batches, rng=rng())
    assert table.info()["samples"] == 0


def test_extend_when_it_fits_never_then_capacity_error_and_now_then_none() -> None:
    table = small_table(4)
    with pytest.raises(CapacityError):
        table.arrivals.reserve(5)
    held = reserve(table, 3)
    assert table.arrivals.reserve(2) is None
    table.ring.abort(held)
    assert table.arrivals.reserve(2) is not None


def test_extend_when_the_writer_died_then_the_next_one_gets_the_rows() -> None:
    table = small_table(4)
    table.arrivals.commit(reserve(table, 4))
    table.ring.abort(reserve(table, 2))
    assert table.state.list_live_rows().tolist() == [2, 3]
    assert reserve(table, 2).rows.tolist() == [0, 1]


def test_quarantine_when_the_writer_is_silent_then_no_writer_gets_the_rows_until_release() -> None:
    table = small_table(4)
    held = reserve(table, 2)
    table.ring.quarantine(held)
    assert reserve(table, 2).rows.tolist() == [2, 3]
    assert table.arrivals.reserve(1) is None
    with pytest.raises(WrongStateError):
        table.arrivals.commit(held)
    table.ring.release(held)
    assert reserve(table, 2).rows.tolist() == [0, 1]


def test_read_when_rows_are_live_then_given_in_order_and_not_counted() -> None:
    table = small_table(4)
    table.arrivals.commit(reserve(table, 3))
    plan = table.plan_read(np.array([2, 0, 2]))
    assert plan.rows.tolist() == [2, 0, 2]
    assert plan.generations.tolist() == [2, 2, 2]
    assert table.info()["samples"] == 0
    assert table.plan_read(np.empty(0, np.int64)).rows.size == 0


@pytest.mark.parametrize(("row", "reason"), [(3, "not live"), (4, "rows 0 to 3"), (-1, "rows 0 to 3")])
def test_read_when_a_row_is_not_there_then_selection_error(row: int, reason: str) -> None:
    table = small_table(4)
    table.arrivals.commit(reserve(table, 3))
    with pytest.raises(SelectionError, match=reason) as caught:
        table.plan_read(np.array([0, row]))
    assert caught.value.selection == str(row)


def test_info_when_used_then_every_count_is_right() -> None:
    table = small_table(8, min_size=2)
    table.arrivals.commit(reserve(table, 5))
    table.ring.abort(reserve(table, 2))
    table.samples.draw_sample(3, 2, rng=rng())
    reserve(table, 1)
    expected: dict[str, Any] = {"num_rows": 5, "capacity": 8, "num_held": 0, "num_reserved": 1, "num_holes": 1}
    expected |= {"num_leased": 0, "cursor": 7, "inserts": 5, "samples": 6, "settings": table.settings.to_json()}
    assert table.info() == expected
    assert len(table) == 5


def test_restore_when_the_server_restarts_then_rows_and_counts_are_back() -> None:
    generations = np.zeros(8, np.int64)
    table = Table(TableState("replay", 8, generations, Settings()))
    table.arrivals.commit(reserve(table, 5))
    table.samples.draw_sample(3, rng=rng())
    reserve(table, 2)
    again = Table(TableState.restore("replay", generations, table.settings, table.state.get_state()))
    assert again.state.list_live_rows().tolist() == [0, 1, 2, 3, 4]
    assert again.info() == {**table.info(), "num_reserved": 0, "num_holes": 2}
    assert reserve(again, 3).rows.tolist() == [5, 6, 7]


def test_restore_when_writers_may_live_then_their_rows_are_held() -> None:
    generations = np.array([2, 1, 1, 0], np.int64)
    table = Table(TableState.restore("replay", generations, Settings(), {"cursor": 3}, now_reserved=[np.array([2])]))
    assert table.info()["num_reserved"] == 1
    assert reserve(table, 2).rows.tolist() == [1, 3]


def test_table_when_the_limiter_could_never_let_through_then_refused() -> None:
    with pytest.raises(InvalidRequestError):
        small_table(4, min_size=5)


def test_priority_when_none_is_given_then_the_highest_so_far() -> None:
    table = table_of(sampler=Prioritized())
    write(table, 1)
    write(table, 2, priorities=np.array([0.25, 3.0]))
    write(table, 1)
    table.update_priority(numbers(0), np.array([8.0]), None)
    write(table, 1)
    assert table.columns.priority[:5].tolist() == [8.0, 0.25, 3.0, 3.0, 8.0]


def test_update_priority_when_rows_were_overwritten_then_skipped_and_counted() -> None:
    table = table_of(4, sampler=Prioritized())
    write(table, 4)
    generations = table.plan_read(numbers(0, 1, 2)).generations.astype(np.uint32)
    write(table, 1)
    reserve(table, 1)
    assert table.update_priority(numbers(0, 1, 2), np.array([5.0, 6.0, 7.0]), generations) == 2
    assert table.columns.priority[[0, 2, 3]].tolist() == [1.0, 7.0, 1.0]


def test_update_priority_when_rows_are_named_twice_then_the_last_counts_in_samples_too() -> None:
    table = table_of(sampler=Prioritized(eps=0.0))
    write(table, 4)
    update = (numbers(2, 0, 2, 1), np.array([9.0, 0.0, 0.0, 0.0]))
    assert table.update_priority(*update, None) == 0
    assert set(planned(table, 100).rows.tolist()) == {3}


@pytest.mark.parametrize(
    ("named", "priority", "error"),
    [
        ((0, 3), 1.0, SelectionError),
        ((0, 8), 1.0, SelectionError),
        ((0, -1), 1.0, SelectionError),
        ((0, 1), np.nan, InvalidRequestError),
        ((0, 1), -1.0, InvalidRequestError),
    ],
)
@pytest.mark.parametrize("is_checked", [False, True])
def test_update_priority_when_it_cannot_be_then_refused_and_nothing_changes(
    named: tuple[int, ...], priority: float, error: type[Exception], is_checked: bool
) -> None:
    table = table_of(sampler=Prioritized())
    write(table, 3)
    if is_checked and named == (0, 3):
        return  # a row that went is skipped
    generations = np.full(2, 2, np.uint32) if is_checked else None
    with pytest.raises(error):
        table.update_priority(numbers(*named), np.array([4.0, priority]), generations)
    assert table.columns.priority.tolist() == [1.0] * 3 + [0.0] * 5


def test_update_priority_when_the_table_has_none_then_refused() -> None:
    table = table_of()
    write(table, 1)
    with pytest.raises(InvalidRequestError, match="'replay' has neither a sampler nor a remover that uses priorities"):
        table.update_priority(numbers(0), np.array([1.0]), None)


def test_extend_when_the_lowest_priority_goes_then_not_the_oldest() -> None:
    table = table_of(4, remover=LowestPriority())
    write(table, 4, priorities=np.array([3.0, 1.0, 4.0, 2.0]))
    table.update_priority(numbers(3), np.array([0.5]), None)
    assert write(table, 1, priorities=np.array([9.0])) == [3]
    assert write(table, 2, priorities=np.array([0.1, 9.0])) == [1, 0]
    assert write(table, 1) == [1]


def test_delete_when_rows_go_then_each_once_and_the_next_writer_gets_them() -> None:
    table = table_of(4)
    write(table, 4)
    assert delete(table, numbers(2, 0, 2)) == 2
    assert table.state.list_live_rows().tolist() == [1, 3]
    with pytest.raises(SelectionError):
        delete(table, numbers(1, 0))
    assert table.state.list_live_rows().tolist() == [1, 3]
    assert write(table, 2) == [0, 2]


def test_set_limiter_when_it_could_never_let_through_then_refused_and_the_old_one_stays() -> None:
    table = table_of(4)
    with pytest.raises(InvalidRequestError):
        table.set_limiter(MinSize(5))
    assert table.settings.limiter == MinSize(1)
    table.set_limiter(MinSize(3))
    write(table, 2)
    assert table.samples.draw_sample(1, rng=rng()) is None


def test_ratio_when_both_sides_work_then_never_outside_the_buffer() -> None:
    limiter = SampleToInsertRatio(2.0, min_size=3, error_buffer=8.0)
    table, rng = table_of(8, limiter=limiter), np.random.default_rng(5)
    open_ones: list[Reservation] = []
    for _ in range(2000):
        if rng.random() < 0.4:
            reservation = table.arrivals.reserve(int(rng.integers(1, 4)))
            open_ones += [] if reservation is None else [reservation]
        elif open_ones and rng.random() < 0.6:
            table.arrivals.commit(open_ones.pop(int(rng.integers(len(open_ones)))))
        else:
            table.samples.draw_sample(int(rng.integers(1, 4)), rng=rng)
        counts = table.counts
        assert counts.inserts * 2 - counts.samples <= 6 + 8
        assert counts.samples == 0 or counts.inserts * 2 - counts.samples >= 6 - 8
    assert table.counts.samples > 100


def test_extend_when_more_than_the_limiter_could_ever_let_in_then_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_size"):
        table_of(8, sampler=Fifo(), limiter=Queue(4)).arrivals.reserve(5)


def test_slices_when_rows_are_overwritten_then_none_crosses_the_write_position() -> None:
    table = table_of(6, sampler=Slices(slice_len=2))
    for _ in range(4):
        write(table, 2, writer="w")
    reserve(table, 1)
    plan = planned(table, 200)
    assert set(map(tuple, plan.rows.reshape(-1, 2).tolist())) == {(3, 4), (4, 5), (5, 0), (0, 1)}
    assert plan.columns["slice_end"].tolist() == [False, True] * 100


def test_explain_sample_when_keys_or_consumers_exclude_rows_then_names_them() -> None:
    table = table_of()
    write(table, 2, keys=(0,))
    conditions = SampleConditions((1,), "a")
    assert table.samples.draw_sample(1, rng=rng(), conditions=conditions) is None
    assert table.samples.explain_sample(1, conditions) == (
        "a sample of 1 rows of table 'replay', of whose 2 rows too few have all required keys "
        "and consumer 'a' has not had,"
    )
    assert table.samples.explain_sample(1, conditions, names=["a", "b"]) == (
        "a sample of 1 rows of table 'replay', of whose 2 rows too few have all required keys (b is missing in 2) "
        "and consumer 'a' has not had,"
    )


def test_explain_sample_when_whole_rows_have_no_priority_then_names_it() -> None:
    table = table_of(sampler=Prioritized(eps=0))
    write(table, 2, keys=(0,))
    write(table, 3, priorities=np.zeros(3))
    assert table.samples.draw_sample(1, rng=rng()) is None
    assert table.samples.explain_sample(1, names=["a", "b"]) == (
        "a sample of 1 rows of table 'replay', of whose 5 rows the 3 that may be drawn have priority 0, which is never "
        "drawn with eps=0,"
    )


# ---------------------------------------------------------------- staleness


def test_draw_sample_when_a_lag_is_asked_for_then_uniform_among_young_rows() -> None:
    table = table_of(32, policy="p")
    table.selectors.follow("a", 1)
    write(table, 8)
    table.selectors.follow("a", 2)
    young = write(table, 6) + write(table, 2, policy_versions=np.array([1, 2]))[1:]
    plan = planned(table, 7000, conditions=SampleConditions(max_lag=0))
    found, counts = np.unique(plan.rows, return_counts=True)
    assert found.tolist() == young
    assert statistic(counts) < limit(len(young))
    assert set(plan.columns["policy_version"].tolist()) == {2}


def test_draw_sample_when_rows_come_once_each_and_too_few_are_young_then_waits() -> None:
    table = table_of(8, policy="p", sampler=WithoutReplacement())
    table.selectors.follow("a", 1)
    write(table, 2)
    table.selectors.follow("a", 2)
    write(table, 2)
    conditions = SampleConditions(max_lag=0)
    assert table.samples.draw_sample(3, rng=rng(), conditions=conditions) is None
    assert sorted(planned(table, 2, conditions=conditions).rows.tolist()) == [2, 3]
    with pytest.raises(InvalidRequestError):
        table.samples.draw_sample(9, rng=rng(), conditions=conditions)
    assert "at most 0 versions old" in table.samples.explain_sample(3, conditions)


def test_discard_when_rows_are_too_old_then_they_go_but_for_those_on_lease() -> None:
    table = table_of(4, sampler=Fifo(), limiter=Queue(4), is_queue=True, policy="p")
    table.selectors.follow("a", 1)
    write(table, 3)
    held = planned(table, 1, owner=7).rows
    table.selectors.follow("a", 3)
    write(table, 1, policy_versions=np.array([2]))
    assert table.arrivals.reserve(1) is None
    assert (table.departures.discard(2), table.departures.discard(1), table.departures.discard(1)) == (0, 2, 0)
    assert (len(table), table.selectors.staleness.num_discarded) == (2, 2)  # type: ignore[union-attr]
    assert table.arrivals.reserve(2) is not None
    give_back(table, 7, OWN, held)
    assert table.departures.discard(1) == 1
    assert small_table().departures.discard(0) == 0
