"""How a sample is divided among the shards of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.timeouts import compute_answer_timeout_s
from tdserve.client.tables.sampling import Query


class ShardMass(NamedTuple):
    """What a shard said that may be drawn from it.

    Attributes:
        mass: What the probabilities of its draws are shares of.
        least: Of these shares, the least of any row.
        num_epochs: Passes over all rows that a sampler without replacement has begun; the mass is the rest of the last.
        num_rows: Live rows.
        inserts: Rows ever committed.
    """

    mass: float
    least: float
    num_epochs: int
    num_rows: int
    inserts: int

    def is_before(self, epoch: int) -> bool:
        """Returns whether it has finished an epoch, and not begun this one, in which all of its rows are due."""
        return self.num_epochs < epoch and not self.mass


def ask_mass(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> ShardMass:
    """Asks a shard, with one message each way.

    Args:
        num_rows: Rows of the whole sample; a slice of the right length can then be counted.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> ShardMass:
        message = query.make_message(num_rows, 1, deadline.remaining_s)
        message.asks_mass, message.is_plain = True, False  # a worker draws, and knows no masses
        pending = session.send(request, sample=message)
        done = pending.wait(compute_answer_timeout_s(deadline), f"what may be drawn from {query.name!r}").done
        return ShardMass(done.mass, done.least_mass, done.num_epochs, done.counts.rows, done.counts.inserts)

    return client.call(attempt, deadline)


def divide(
    num_units: int,
    masses: Mapping[int, float],
    rng: np.random.Generator,
    *,
    is_distinct: bool = False,
    reserves: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Divides the units of a sample among shards at random, as one draw from all of them would be divided.

    Args:
        num_units: Rows, groups or slices.
        masses: Of each shard; at least one is above 0.
        is_distinct: Whether no unit is drawn twice; then the masses are numbers of units, and a shard gives no more.
        reserves: Units of each shard that come when all others have been drawn, such as those of the next epoch.

    Returns:
        The units of each shard that gives any.
    """
    shards = [shard for shard, mass in masses.items() if mass > 0 or (reserves or {}).get(shard, 0) > 0]
    weights = np.array([masses[shard] for shard in shards], np.float64)
    if not is_distinct:
        counts = rng.multinomial(num_units, weights / weights.sum())
    elif num_units <= weights.sum():
        counts = rng.multivariate_hypergeometric(weights.astype(np.int64), num_units)
    else:
        more = np.array([(reserves or {}).get(shard, 0) for shard in shards], np.int64)
        missing = num_units - int(weights.sum())
        extra = rng.multivariate_hypergeometric(more, min(missing, int(more.sum())))
        counts = weights.astype(np.int64) + extra
    return {shard: int(count) for shard, count in zip(shards, counts, strict=True) if count}
