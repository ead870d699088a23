"""A table whose writer takes rows by itself. The writer of these tests only reports when it was followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import NO_ROWS, Rows
from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.limiter import MinSize, SampleToInsertRatio
from tdserve.rules.replay.rank_draws import RankDraw
from tdserve.rules.replay.remover import LowestPriority
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.priority_order import HighestPriority
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import clear, delete, numbers, rng, table_of, write


class Writer:
    """The claim of one writer, which claims two more rows just when the claim is taken back."""

    num = 1
    num_left = 2
    writer_id = b"writer"
    is_block = has_failed = False
    promised = NO_ROWS

    def __init__(self, table: Table) -> None:
        self.table = table
        self.is_settled = False
        table.claims.append(self)

    def may_hold(self, client_id: bytes) -> bool:
        raise AssertionError("the table does not choose among its writers")

    def catch_up(self) -> bool:
        raise AssertionError("the table asks for the end of a claim, and is caught up by who uses it")

    def listen(self) -> None:
        raise AssertionError("nobody waits")

    def check_committed(self, client_id: bytes, request: int) -> None:
        return

    def take_back(self) -> None:
        if not self.is_settled:
            self.is_settled = True
            self.table.arrivals.claim(2)

    def abandon(self) -> None:
        self.take_back()


@pytest.fixture
def generations() -> Rows:
    """Generations of the table's rows, which a writer changes too, as in the file."""
    return np.zeros(8, np.int64)


@pytest.fixture
def table(generations: Rows) -> Table:
    """Eight rows, of which the two oldest are about to be claimed."""
    found = Table(TableState("replay", 8, generations, Settings(limiter=MinSize(1))))
    write(found, 8)
    return found


def test_claim_when_rows_are_live_then_out_of_every_sample_until_they_are_committed(table: Table) -> None:
    reservation = table.arrivals.claim(3)
    assert (reservation.rows.tolist(), reservation.evicted.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (len(table), table.state.list_live_rows().tolist(), table.info()["num_reserved"]) == (5, [3, 4, 5, 6, 7], 3)
    table.arrivals.arrive(reservation.rows)
    assert (table.arrivals.commit(reservation) == [4, 4, 4]).all()
    assert (len(table), table.info()["inserts"], table.info()["cursor"]) == (8, 11, 3)


def test_claim_when_the_writer_has_made_its_rows_odd_before_then_the_same(table: Table, generations: Rows) -> None:
    generations[:3] |= 1
    reservation = table.arrivals.claim(3)
    assert reservation.evicted.tolist() == [0, 1, 2]
    assert (table.arrivals.commit(reservation) == [4, 4, 4]).all()


def test_claim_when_the_ring_is_at_its_end_then_goes_round_and_may_be_given_up(table: Table) -> None:
    write(table, 7)
    reservation = table.arrivals.claim(2)
    assert reservation.rows.tolist() == [7, 0]
    table.ring.abort(reservation)
    assert (len(table), table.info()["num_holes"]) == (6, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.arrivals.reserve(1),
        lambda table: delete(table, numbers(5)),
        clear,
        lambda table: table.close(),
        lambda table: table.state.hold(numbers(5)),
        lambda table: table.set_limiter(MinSize(3)),
        lambda table: table.state.remove(numbers(0, 1, 5)),
    ],
)
def test_change_when_rows_are_claimed_then_these_are_taken_back_first_and_not_touched(
    table: Table, generations: Rows, change: Callable[[Table], object]
) -> None:
    writer = Writer(table)
    change(table)
    assert writer.is_settled
    assert (generations[:2] == 3).all(), "the writer's, whatever was done"


def test_hold_when_the_rows_were_claimed_in_this_moment_then_they_are_not_live(table: Table) -> None:
    Writer(table)
    with pytest.raises(SelectionError, match="not live"):
        table.state.hold(numbers(1))


def test_num_claimable_when_rows_are_held_or_given_up_then_up_to_there(table: Table) -> None:
    assert table.arrivals.count_claimable(3) == 3
    assert table.arrivals.count_claimable(100) == 4, "half a round"
    table.state.hold(numbers(2))
    assert (table.arrivals.count_claimable(100), table.arrivals.count_claimable(100, num_promised=3)) == (2, 4)
    delete(table, numbers(7))
    assert table.arrivals.count_claimable(100) == 0, "holes are filled first"
    assert table.arrivals.count_claimable(100, num_promised=1) == 1


def test_num_claimable_when_the_writer_is_just_claiming_what_it_was_promised_then_more_behind(
    table: Table, generations: Rows
) -> None:
    generations[:2] |= 1
    assert table.arrivals.count_claimable(4, num_promised=2) == 4


@pytest.mark.parametrize(
    "parts", [{}, {"sampler": Prioritized()}, {"sampler": Fifo()}, {"sampler": WithoutReplacement()}]
)
def test_draw_for_ranks_when_the_writer_is_just_claiming_rows_then_only_others(
    generations: Rows, parts: dict[str, Any]
) -> None:
    table = Table(TableState("replay", 8, generations, Settings(**parts)))
    write(table, 8)
    generations[:2] |= 1
    Writer(table)
    made = RankDraw.make(table, 0, DrawTerms(3, 2, PLAIN), rng=rng())
    assert made is not None
    assert sorted(made.draw.rows.tolist()) == [2, 3, 4, 5, 6, 7]
    assert table.totals.num_samples == 6
    assert RankDraw.make(table, 1, DrawTerms(4, 2, PLAIN), rng=rng()) is None


def test_draw_for_ranks_when_it_cannot_be_known_what_is_claimed_then_waits(table: Table, generations: Rows) -> None:
    class Failing(Writer):
        def take_back(self) -> None:
            """Finds no room on the disk."""

    generations[:2] |= 1
    Failing(table)
    assert RankDraw.make(table, 0, DrawTerms(4, 2, PLAIN), rng=rng()) is None
    assert (table.totals.num_samples, len(table.ring.pins)) == (0, 0)


@pytest.mark.parametrize("sampler", [Fifo(), Lifo(), HighestPriority(), Prioritized(), WithoutReplacement()])
def test_num_claimable_when_only_the_next_rows_are_asked_for_then_some(sampler: object) -> None:
    assert table_of(sampler=sampler).arrivals.count_claimable(2) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"limiter": SampleToInsertRatio(1.0, min_size=1, error_buffer=8.0)},
        {"remover": LowestPriority()},
        {"sampler": Slices(slice_len=2)},
        {"max_times_sampled": 1},
        {"policy": "policy"},
    ],
)
def test_num_claimable_when_more_is_to_be_decided_then_none(settings: dict[str, Any]) -> None:
    assert table_of(**settings).arrivals.count_claimable(2) == 0
    assert not Settings(**settings).is_plain_ring


def test_resume_when_rows_were_filled_before_a_restart_then_they_can_be_committed() -> None:
    generations = np.array([2, 3, 1, 0], np.int64)
    table = Table(TableState.restore("replay", generations, Settings(), {"cursor": 1}, now_reserved=[numbers(1, 2)]))
    (reservation,) = table.ring.quarantined
    table.ring.resume(reservation)
    table.arrivals.arrive(reservation.rows)
    table.arrivals.commit(reservation)
    assert table.state.list_live_rows().tolist() == [0, 1, 2]
    assert table.info()["num_reserved"] == 0
