"""Tables as tests want them, and the least that a test has to say of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.messages.row_numbers import sort_unique
from tdserve.rules.replay.limiter import MinSize, Queue
from tdserve.rules.replay.live_rows import Rows
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.plans import Arrival, SamplePlan
from tdserve.rules.replay.reservation import Reservation
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table


def small_table(capacity: int = 8, min_size: int = 1) -> Table:
    """A uniform table."""
    return Table("replay", capacity, np.zeros(capacity, np.int64), Settings(limiter=MinSize(min_size)))


def table_of(capacity: int = 8, **parts: Any) -> Table:
    """A table with some settings, whose rows have two leaves."""
    return Table("replay", capacity, np.zeros(capacity, np.int64), Settings(**parts), num_keys=2)


def queue(capacity: int = 4) -> Table:
    """A queue that holds as many rows as there are."""
    return table_of(capacity, sampler=Fifo(), limiter=Queue(capacity), is_queue=True)


def write(table: Table, num_rows: int, **arrival: Any) -> list[int]:
    """The numbers of rows that were committed."""
    reservation = reserve(table, num_rows)
    table.arrive(reservation.rows, Arrival(**arrival))
    table.commit(reservation)
    rows: list[int] = reservation.rows.tolist()
    return rows


def planned(table: Table, num_rows: int, num_batches: int = 1, **fields: Any) -> SamplePlan:
    """A sample, which there must be."""
    plan = table.plan_sample(num_rows, num_batches, rng=rng(), **fields)
    assert plan is not None
    return plan


def more(table: Table, plan: SamplePlan, max_drawn: int) -> SamplePlan:
    """The next part of a sample, which there must be."""
    part = table.draw_more(plan, max_drawn, rng=rng())
    assert part is not None
    return part


def delete(table: Table, rows: Rows) -> int:
    """Removes live rows, all at once; returns how many."""
    rows = sort_unique(rows)
    table.check_live(rows)
    return sum(table.delete_in_pieces([rows]))


def clear(table: Table, *, resets_counts: bool = False) -> int:
    """Removes all rows, all at once; returns how many there were."""
    return sum(table.clear_in_pieces(resets_counts=resets_counts))


def acknowledge(table: Table, owner: int, consumer: str, rows: Rows, generations: Any = None) -> int:
    """Acknowledges rows of a lease, all at once; returns how many."""
    return sum(table.acknowledge_in_parts(owner, consumer, rows, generations))


def give_back(table: Table, owner: int, consumer: str, rows: Rows, generations: Any = None) -> None:
    """Gives rows of a lease back, all at once."""
    for _ in table.give_back_in_parts(owner, consumer, rows, generations):
        pass


def numbers(*named: int) -> Any:
    """Row numbers."""
    return np.array(named, np.int64)


def reserve(table: Table, num_rows: int) -> Reservation:
    """Rows for a writer, which there must be."""
    reservation = table.plan_extend(num_rows)
    assert reservation is not None
    return reservation


def rng() -> np.random.Generator:
    """A source of randomness, always the same."""
    return np.random.default_rng(0)
