"""Tables for tests, and short ways to write, sample and remove rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.limiter import MinSize, Queue
from tdserve.rules.replay.plans import Arrival, SamplePlan
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState


def small_table(capacity: int = 8, min_size: int = 1) -> Table:
    """Returns a table with the uniform sampler."""
    return Table(TableState("replay", capacity, np.zeros(capacity, np.int64), Settings(limiter=MinSize(min_size))))


def table_of(capacity: int = 8, **parts: Any) -> Table:
    """Returns a table with these settings, whose rows have two leaves."""
    return Table(TableState("replay", capacity, np.zeros(capacity, np.int64), Settings(**parts), num_keys=2))


def queue(capacity: int = 4) -> Table:
    """Returns a queue whose size is its capacity."""
    return table_of(capacity, sampler=Fifo(), limiter=Queue(capacity), is_queue=True)


def write(table: Table, num_rows: int, **arrival: Any) -> list[int]:
    """Commits rows; returns their numbers."""
    reservation = reserve(table, num_rows)
    table.arrivals.arrive(reservation.rows, Arrival(**arrival))
    table.arrivals.commit(reservation)
    rows: list[int] = reservation.rows.tolist()
    return rows


def planned(table: Table, num_rows: int, num_batches: int = 1, **fields: Any) -> SamplePlan:
    """Plans a sample, which must be possible."""
    plan = table.samples.draw_sample(num_rows, num_batches, rng=rng(), **fields)
    assert plan is not None
    return plan


def more(table: Table, plan: SamplePlan, max_drawn: int) -> SamplePlan:
    """Draws the next part of a sample, which must be possible."""
    part = table.samples.draw_more(plan, max_drawn, rng=rng())
    assert part is not None
    return part


def delete(table: Table, rows: Rows) -> int:
    """Removes live rows, all at once; returns how many."""
    rows = sort_unique(rows)
    table.state.check_live(rows)
    return sum(table.departures.depart_in_pieces(table.departures.plan_departure(RowSet.from_rows(rows))))


def clear(table: Table, *, resets_counts: bool = False) -> int:
    """Removes all rows, all at once; returns how many there were."""
    return sum(table.departures.depart_in_pieces(table.departures.plan_clear(resets_counts=resets_counts)))


def acknowledge(
    table: Table, owner: int, consumer: str, rows: Rows, generations: Any = None, *, request: int = 0
) -> int:
    """Acknowledges rows of a lease, all at once; returns how many."""
    parts = list(table.leases.find_acknowledged_in_parts(owner, consumer, rows, generations, request=request))
    departure = table.departures.plan_departure(RowSet.from_rows(np.concatenate(parts)), consumer)
    return sum(table.departures.depart_in_pieces(departure, owner=owner))


def give_back(
    table: Table, owner: int, consumer: str, rows: Rows, generations: Any = None, *, request: int = 0
) -> None:
    """Gives rows of a lease back, all at once."""
    for _ in table.leases.give_back_in_parts(owner, consumer, rows, generations, request=request):
        pass


def numbers(*named: int) -> Any:
    """Returns an array of row numbers."""
    return np.array(named, np.int64)


def reserve(table: Table, num_rows: int) -> Reservation:
    """Reserves rows, which must be possible."""
    reservation = table.arrivals.reserve(num_rows)
    assert reservation is not None
    return reservation


def rng() -> np.random.Generator:
    """Returns a random generator with a fixed seed."""
    return np.random.default_rng(0)
