from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, SelectionError
from tdserve.rules.replay.eligibility.conditions import PLAIN, SampleConditions
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.remover import LowestPriority
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import acknowledge, clear, delete

PARTIAL = 1 << 44
"""What one partial write adds to a generation."""


class _Files:
    """What outlives a table."""

    def __init__(self, capacity: int, num_keys: int = 2, **parts: Any) -> None:
        self.generations = np.zeros(capacity, np.int64)
        self.columns: dict[str, Any] = {}
        self.settings = Settings(**parts)
        self.num_keys = num_keys
        self.table = Table(
            TableState("r", capacity, self.generations, self.settings, make_column=self.make, num_keys=num_keys)
        )

    def make(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.columns.setdefault(name, np.zeros(shape, dtype))

    def write(self, num_rows: int, **arrival: Any) -> list[int]:
        reservation = self.table.arrivals.reserve(num_rows)
        assert reservation is not None
        self.table.arrivals.arrive(reservation.rows, Arrival(**arrival))
        self.table.arrivals.commit(reservation)
        found: list[int] = reservation.rows.tolist()
        return found

    def hide(self, rows: Any) -> None:
        self.table.state.hold(rows)
        self.table.ring.hide(rows)

    def let_go(self, rows: Any, keys: Sequence[int] = ()) -> None:
        self.table.state.show(rows, keys)
        self.table.state.let_go(rows)

    def drawn(self, num_rows: int, **fields: Any) -> list[int] | None:
        plan = self.table.samples.draw_sample(num_rows, rng=np.random.default_rng(0), **fields)
        return None if plan is None else [int(row) for row in plan.rows]

    def restart(self, held: Any = None) -> Table:
        state = self.table.state.get_state()
        self.table = Table(
            TableState.restore(
                "r", self.generations, self.settings, state, held=held, make_column=self.make, num_keys=self.num_keys
            )
        )
        return self.table


def rows(*numbers: int) -> Any:
    """Row numbers."""
    return np.array(numbers, np.int64)


def test_table_when_the_settings_cannot_be_then_refused() -> None:
    with pytest.raises(InvalidRequestError):
        _Files(4, limiter=MinSize(5))
    with pytest.raises(InvalidRequestError):
        Table(TableState("r", 0, np.zeros(0, np.int64), Settings()))


def test_hold_when_rows_are_written_to_then_unreadable_unsampled_and_not_reserved_again() -> None:
    files = _Files(4)
    files.write(4)
    table = files.table
    files.hide(rows(1, 2))
    assert files.generations.tolist() == [2, 3, 3, 2]
    assert set(files.drawn(50) or []) == {0, 3}
    assert (len(table), table.info()["num_held"], table.info()["num_reserved"]) == (4, 2, 0)
    assert table.arrivals.reserve(3) is None
    files.let_go(rows(1, 2), (0,))
    assert files.generations.tolist() == [2, 2 + PARTIAL, 2 + PARTIAL, 2]  # moved, and still the same rows
    assert set(files.drawn(50) or []) == {0, 1, 2, 3}
    assert table.info()["num_held"] == 0


def test_hold_when_a_row_is_not_live_then_refused_and_nothing_changes() -> None:
    files = _Files(4)
    files.write(2)
    with pytest.raises(SelectionError, match="not live"):
        files.table.state.hold(rows(1, 2))
    assert files.generations.tolist() == [2, 2, 0, 0]
    assert len(files.table.selectors.get(PLAIN)) == 2


def test_let_go_when_the_rows_lacked_leaves_then_they_have_those_that_were_written() -> None:
    files = _Files(4)
    files.write(3, keys=(0,))
    assert files.drawn(1) is None
    for keys, whole in (((), 0), ((1,), 1)):
        files.hide(rows(1))
        files.let_go(rows(1), keys)
        assert len(files.table.selectors.get(PLAIN)) == whole
    assert files.drawn(1) == [1]


def test_hold_when_the_first_partial_rows_come_meanwhile_then_the_held_ones_are_whole_all_the_same() -> None:
    files = _Files(4)
    files.write(2)
    files.hide(rows(0))
    files.write(1, keys=(1,))
    files.let_go(rows(0), (0,))
    assert len(files.table.selectors.get(PLAIN)) == 2
    assert set(files.drawn(50) or []) == {0, 1}


def test_extend_when_the_lowest_rows_are_held_then_waits_and_evicts_none() -> None:
    files = _Files(4, remover=LowestPriority())
    files.write(4)
    files.hide(rows(0, 1))
    assert files.table.arrivals.reserve(3) is None
    assert files.table.state.list_live_rows().tolist() == [0, 1, 2, 3]
    assert (len(files.table), files.table.ring.num_held) == (4, 2)
    files.let_go(rows(0, 1))
    assert files.table.arrivals.reserve(3) is not None


def test_hold_when_the_remover_looks_at_priorities_then_the_held_rows_stay() -> None:
    files = _Files(4, remover=LowestPriority())
    files.write(4, priorities=np.array([1.0, 2.0, 3.0, 4.0]))
    files.hide(rows(0))
    assert files.write(1, priorities=np.array([9.0])) == [1]
    files.let_go(rows(0))
    assert files.write(1, priorities=np.array([9.0])) == [0]


def test_restore_when_rows_are_half_written_then_kept_from_all_until_the_write_is_done() -> None:
    files = _Files(4)
    files.write(4)
    files.hide(rows(1, 2))
    table = files.restart(held=rows(1, 2))
    assert set(files.drawn(50) or []) == {0, 3}
    assert table.info()["num_held"] == 2
    assert table.arrivals.reserve(3) is None
    files.let_go(rows(1, 2), (0,))
    assert table.state.list_live_rows().tolist() == [0, 1, 2, 3]
    assert set(files.drawn(50) or []) == {0, 1, 2, 3}


def test_restore_when_the_write_had_not_begun_then_the_rows_are_live() -> None:
    files = _Files(4)
    files.write(4)
    table = files.restart(held=rows(1, 2))
    assert table.state.list_live_rows().tolist() == [0, 1, 2, 3]
    assert table.info()["num_held"] == 0


@pytest.mark.parametrize(("sampler", "order"), [(Fifo(), [2, 3, 0]), (Lifo(), [0, 3, 2])])
def test_restore_when_rows_have_an_order_then_it_is_that_of_the_commits(sampler: Any, order: list[int]) -> None:
    files = _Files(4, sampler=sampler)
    files.write(4)
    files.write(1)
    delete(files.table, rows(1))
    files.restart()
    assert files.drawn(3) == order


def test_restore_when_there_were_priorities_then_they_and_the_highest_are_back() -> None:
    files = _Files(4, sampler=Prioritized(), remover=LowestPriority())
    files.write(3, priorities=np.array([5.0, 1.0, 7.0]))
    files.table.update_priority(rows(0), np.array([9.0]), None)
    table = files.restart()
    assert table.columns.priority[:3].tolist() == [9.0, 1.0, 7.0]
    (last,) = files.write(1)
    assert table.columns.priority[last] == 9.0
    assert files.write(1) == [1]


def test_restore_when_consumers_had_rows_then_not_again() -> None:
    files = _Files(4, sampler=Fifo())
    files.write(3)
    conditions = SampleConditions(consumer="a")
    assert files.drawn(2, conditions=conditions, owner=1) == [0, 1]
    acknowledge(files.table, 1, "a", rows(0))
    files.restart()
    assert files.drawn(2, conditions=conditions, owner=2) == [1, 2]  # row 1 was not acknowledged
    assert files.drawn(3) == [0, 1, 2]


def test_restore_when_rows_lack_leaves_then_still() -> None:
    files = _Files(4)
    files.write(2, keys=(0,))
    files.write(1)
    files.restart()
    assert set(files.drawn(30) or []) == {2}
    assert set(files.drawn(30, conditions=SampleConditions((0,))) or []) == {0, 1, 2}


def test_restore_when_a_last_sample_was_cut_short_then_its_rows_can_be_had_once_more() -> None:
    files = _Files(4, sampler=Fifo(), max_times_sampled=1)
    files.write(3)
    assert files.drawn(2) == [0, 1]
    table = files.restart()
    assert table.columns.times_sampled.tolist() == [0, 0, 0, 0]
    assert files.drawn(3) == [0, 1, 2]


def test_restore_when_rows_form_trajectories_then_slices_are_the_same() -> None:
    files = _Files(6, sampler=Slices(slice_len=2))
    files.write(2, writer="v")
    files.write(2, writer="w", ends=np.array([True, False]))
    files.write(1, writer="v")
    before = {tuple(files.drawn(2) or []) for _ in range(1)}
    for _ in range(2):
        plan = files.table.samples.draw_sample(200, rng=np.random.default_rng(1))
        assert plan is not None
        assert set(map(tuple, plan.rows.reshape(-1, 2).tolist())) == {(0, 1), (1, 4)} >= before
        files.restart()


def test_restore_when_a_row_of_a_trajectory_is_half_written_then_slices_are_whole_afterwards() -> None:
    files = _Files(6, sampler=Slices(slice_len=2))
    files.write(3, writer="v")
    files.hide(rows(1))
    table = files.restart(held=rows(1))
    assert files.drawn(2) is None
    files.let_go(rows(1), (0,))
    plan = table.samples.draw_sample(100, rng=np.random.default_rng(0))
    assert plan is not None
    assert set(map(tuple, plan.rows.reshape(-1, 2).tolist())) == {(0, 1), (1, 2)}


def test_restore_when_the_table_was_closed_or_its_limiter_changed_then_still() -> None:
    files = _Files(4)
    files.table.set_limiter(MinSize(2))
    files.table.close()
    assert files.table.state.get_state()["settings"] == Settings(limiter=MinSize(2)).to_json()
    assert files.restart().is_closed
    assert files.table.state.get_state()["settings"] == Settings(limiter=MinSize(2)).to_json()


def test_counts_when_cleared_then_begin_anew_and_survive_a_restart() -> None:
    files = _Files(4)
    files.write(3)
    files.drawn(5)
    clear(files.table)
    files.write(2)
    files.drawn(4)
    for table in (files.table, files.restart()):
        counts = table.counts
        assert (counts.num_rows, counts.inserts, counts.samples, counts.capacity) == (2, 2, 4, 4)


@pytest.mark.parametrize(("number", "reason"), [(-1, "rows 0 to 3"), (4, "rows 0 to 3"), (3, "not live")])
def test_check_live_when_a_row_is_not_there_then_it_is_named(number: int, reason: str) -> None:
    files = _Files(4)
    files.write(3)
    with pytest.raises(SelectionError, match=reason) as caught:
        files.table.state.check_live(rows(0, number))
    assert caught.value.selection == str(number)


def test_remove_when_rows_go_then_the_next_writer_gets_them() -> None:
    files = _Files(4)
    files.write(4)
    files.table.state.remove(rows(3, 1))
    assert files.generations.tolist() == [2, 3, 2, 3]
    assert files.write(2) == [3, 1]


def test_restore_when_rows_have_policy_versions_then_they_and_the_policy_are_known_again() -> None:
    files = _Files(8, policy="p")
    files.table.selectors.follow("a", 4)
    files.write(2, policy_versions=rows(1, 3))
    files.write(1)
    files.table.departures.discard(2)
    conditions = SampleConditions(max_lag=1)
    table = files.restart()
    staleness = table.selectors.staleness
    assert staleness is not None
    assert (staleness.uid, staleness.num_discarded) == ("a", 1)
    table.selectors.follow("a", 5)
    assert set(files.drawn(50, conditions=conditions) or []) == {2}
    assert staleness.measure_lags() == (1, 1.5, 2)
    files.restart().selectors.follow("b", 5)
    assert files.drawn(1, conditions=SampleConditions(max_lag=100)) is None
    assert files.write(2, policy_versions=rows(4, 5)) == [0, 3]
    table = files.restart()
    assert set(files.drawn(50, conditions=SampleConditions(max_lag=100)) or []) == {0, 3}
    plan = table.samples.draw_sample(50, rng=np.random.default_rng(0))
    assert plan is not None
    known = dict(zip(plan.rows.tolist(), plan.columns["policy_version"].tolist(), strict=True))
    assert known == {0: 4, 1: -1, 2: -1, 3: 5}


@pytest.mark.parametrize(("slice_len", "num_rows"), [(8, 4096), (1000, 131), (50_000, 64)])
def test_iter_steps_when_slices_are_long_then_fewer_scattered_rows_at_a_time(slice_len: int, num_rows: int) -> None:
    table = Table(TableState("r", 100_000, np.zeros(100_000, np.int64), Settings(sampler=Slices(slice_len=slice_len))))
    scattered = np.arange(0, 100_000, 7)
    steps = list(table.state.iter_steps([scattered, slice(0, 10_000)]))
    num_scattered = -(-len(scattered) // num_rows)
    assert {len(rows) for rows in steps[: num_scattered - 1]} == {num_rows}
    assert [len(rows) for rows in steps[num_scattered:]] == [4096, 4096, 10_000 - 2 * 4096]
    assert np.concatenate(steps).tolist() == [*scattered.tolist(), *range(10_000)]
