"""How a sample is divided among the shards of a table, by what may be drawn from each."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import EndOfStreamError
from tdserve.rules.replay.settings import Settings

FRESH_S = 0.05
"""Age up to which a shard's mass is used without asking again: rows that others have written meanwhile are drawn a
little too rarely."""

_MAX_QUESTIONS = 64

_MAX_COUNTED_UNITS = 10**9
"""Units from which on numpy does not divide a draw by their numbers alone."""


class ShardScale(NamedTuple):
    """What the probabilities and weights of a shard's rows are relative to; attributes as in :class:`ShardMass`."""

    mass: float
    least: float


class ShardMass(NamedTuple):
    """What a shard said that may be drawn from it.

    Attributes:
        mass: What the probabilities of its draws are shares of.
        least: Smallest of these shares.
        num_epochs: Passes over all rows that a sampler without replacement has begun; the mass is the rest of the last.
        num_drawable: Rows that samples can have before one comes again.
        is_final: Whether it is closed, and no other rows may come, or come back.
        num_rows: Live rows.
        inserts: Rows ever committed.
        missing: Which leaves are missing in how many rows, and how many the consumer has had that are kept; "" if
            nothing is missing, or it has rows enough.
        num_draws: How often its rows can be drawn, all together, if it is final, does not have enough of them, and they
            leave once they were drawn often enough; else 0.
    """

    mass: float
    least: float
    num_epochs: int
    num_drawable: int
    is_final: bool
    num_rows: int
    inserts: int
    missing: str = ""
    num_draws: int = 0

    @property
    def scale(self) -> ShardScale:
        """What the probabilities and weights of its rows are relative to."""
        return ShardScale(self.mass, self.least)

    def is_before(self, epoch: int) -> bool:
        """Returns whether it has finished an epoch, and not begun this one, in which all of its rows are due."""
        return self.num_epochs < epoch and not self.mass


class KnownMasses:
    """The last answers of a table's shards, by question: masses depend on the conditions of a sample.

    Args:
        fresh_s: Age up to which they are used.
    """

    def __init__(self, fresh_s: float = FRESH_S) -> None:
        self._fresh_s = fresh_s
        self._known: dict[Hashable, tuple[float, Mapping[int, ShardMass]]] = {}

    def find(self, question: Hashable, live: Collection[int], now_s: float) -> Mapping[int, ShardMass] | None:
        """Returns the answers to a question; None if they are too old, or that of a shard that is not live."""
        answered_s, known = self._known.get(question, (0.0, {}))
        is_usable = bool(known) and now_s - answered_s <= self._fresh_s and set(known) <= set(live)
        return known if is_usable else None

    def note(self, question: Hashable, masses: Mapping[int, ShardMass], now_s: float) -> None:
        """Notes the answers of all shards that gave one."""
        if len(self._known) > _MAX_QUESTIONS:
            self._known.clear()
        self._known[question] = now_s, masses

    def forget(self) -> None:
        """Forgets all answers: this client has changed the table."""
        self._known.clear()


def check_not_final(
    table: str, masses: Mapping[int, ShardMass], num_shards: int, *, num_needed: int, unit: int = 1
) -> None:
    """Raises EndOfStreamError if the table is final; see ``is_table_final``.

    Args:
        table: Name of the table, for the error.
        num_needed: Rows of the whole sample, of all ranks together, for the error.
        unit: Rows of which each shard gives whole multiples.
    """
    if is_table_final(masses, num_shards):
        lefts = [found.num_drawable for found in masses.values()]
        is_short = sum(left // unit * unit for left in lefts) < num_needed  # otherwise the limiter keeps them
        raise EndOfStreamError(name=table, num_left=sum(lefts), num_needed=num_needed if is_short else 0)


def is_table_final(masses: Mapping[int, ShardMass], num_shards: int) -> bool:
    """Returns whether no shard, also none that is away, may have other rows later than it has now."""
    return len(masses) == num_shards and all(found.is_final for found in masses.values())


def _is_below_min_size(settings: Settings, masses: Mapping[int, ShardMass]) -> bool:
    """Returns whether the limiter makes samples wait for more rows. Samples of closed shards do not wait for these."""
    num_live = sum(found.num_rows for found in masses.values())
    return num_live < getattr(settings.limiter, "min_size", 0) and not all(each.is_final for each in masses.values())


def explain_shortage(
    settings: Settings, masses: Mapping[int, ShardMass], conditions: Sequence[str], *, servers: Sequence[int]
) -> str:
    """Returns why a sample waits for rows, for the error when it has waited too long.

    Args:
        settings: Settings of the whole table.
        masses: The last answers of its shards.
        conditions: What the sample asks of a row, such as "have 'reward'".
        servers: The server of each shard.
    """
    num_live = sum(found.num_rows for found in masses.values())
    each = [f"{found.num_rows} at shard {shard}" for shard, found in sorted(masses.items())]
    silent = [shard for shard in range(len(servers)) if shard not in masses]
    each += [f"no answer from shard {shard} at server {servers[shard]}" for shard in silent]
    if _is_below_min_size(settings, masses):
        need = f", and {settings.limiter!r} needs more"
    elif conditions:
        need = f", of which too few {' and '.join(conditions)}"
    else:
        need = ", too few of which can be drawn now"
    missing = "; ".join(f"at shard {shard} {found.missing}" for shard, found in sorted(masses.items()) if found.missing)
    lacking = f" ({missing})" if missing else ""
    return f"it has {num_live} live rows ({', '.join(each)}){need}{lacking}"


def divide_sample(
    settings: Settings,
    masses: Mapping[int, ShardMass],
    num_rows: int,
    rng: np.random.Generator,
    *,
    unit: int = 1,
    limits: Mapping[int, int] | None = None,
    is_lease: bool = False,
    is_grouped: bool = False,
    takes_fewer: bool = False,
    is_closed: bool = False,
) -> dict[int, int] | None:
    """Divides the rows of a sample among shards; returns None if they do not have enough.

    Args:
        settings: Settings of the whole table.
        unit: Rows that are drawn together: of a group, or a slice.
        limits: Most units of some shards, which had not as many as their masses say.
        is_lease: Whether the rows are taken on lease.
        is_grouped: Whether whole groups are drawn.
        takes_fewer: Whether a sample without repetitions may have fewer rows, if the shards do not have more.
        is_closed: Whether the table is closed: then its limiter lets lease holders take the remaining rows.
    """
    keeps_epoch = settings.sampler.keeps_epoch and not is_grouped
    shares = {shard: found.mass for shard, found in masses.items()}
    reserves = dict[int, float]()
    if keeps_epoch:  # of the rows that the sample may have: others are on lease, say
        epoch = max(found.num_epochs for found in masses.values())
        shares |= {shard: float(found.num_drawable) for shard, found in masses.items() if found.is_before(epoch)}
        reserves = {shard: max(found.num_drawable - shares[shard], 0) for shard, found in masses.items()}
    is_distinct = is_lease or is_grouped or settings.sampler.is_distinct or settings.draws_once
    # Of a lease, the rows of each shard; masses of other draws without repetitions are numbers of units themselves.
    is_weighed = is_lease and settings.sampler.uses_priority and not is_grouped
    room = {shard: float(found.num_drawable) for shard, found in masses.items()} if is_weighed else dict(shares)
    if is_distinct:
        room |= {shard: min(room.get(shard, 0.0), limit) for shard, limit in (limits or {}).items()}
        reserves |= {
            shard: min(reserves[shard], limit - room[shard])
            for shard, limit in (limits or {}).items()
            if shard in reserves
        }
    total = sum(room.values()) + sum(reserves.values())
    num_live = sum(found.num_rows for found in masses.values())
    if not total or (_is_below_min_size(settings, masses) and not (is_lease and is_closed)):
        return None
    num_units = -(-num_rows // unit)
    if is_distinct:
        num_there = int(total)
        num_units = min(num_units, num_there) if takes_fewer else num_units
        if not 0 < num_units <= num_there:
            return None
    if is_weighed:
        return _divide_limited(num_units, shares, room, rng)
    if is_distinct or not settings.max_times_sampled:
        counts = divide(num_units, room, rng, is_distinct=is_distinct, reserves=reserves)
        return {shard: count * unit for shard, count in counts.items()}
    each = 1 if num_units <= num_live else settings.max_times_sampled  # which is what some may have left
    most = {shard: found.num_draws or each * found.num_rows for shard, found in masses.items()}
    return _divide_limited(num_units, shares, {**most, **(limits or {})}, rng)


def divide_among_ranks(
    settings: Settings,
    masses: Mapping[int, ShardMass],
    num_rows: int,
    world_size: int,
    rng: np.random.Generator,
    *,
    unit: int = 1,
    is_grouped: bool = False,
) -> dict[int, int] | None:
    """Divides the rows of each rank of a step among shards; returns None if these do not have enough.

    Every rank gets as many rows of a shard as the others, and no row comes twice, whatever the sampler. So a shard
    gives whole multiples of ``world_size`` units.

    Args:
        settings: Settings of the whole table.
        num_rows: Rows of each rank, whole units.
        world_size: Number of ranks.
        unit: Rows that are drawn together, of a group.
        is_grouped: Whether whole groups are drawn.
    """
    room = {shard: found.num_drawable // (world_size * unit) for shard, found in masses.items()}
    num_units = num_rows // unit
    if _is_below_min_size(settings, masses) or sum(room.values()) < num_units:
        return None
    sampler = settings.sampler
    counts: dict[int, int] | None
    if sampler.keeps_epoch and not is_grouped:
        epoch = max(found.num_epochs for found in masses.values())
        due = {
            shard: room[shard] if found.is_before(epoch) else min(room[shard], int(found.mass) // world_size)
            for shard, found in masses.items()
        }
        reserves = {shard: room[shard] - due[shard] for shard in room}
        counts = divide(num_units, due, rng, is_distinct=True, reserves=reserves)
    elif sampler.uses_priority and not (sampler.is_distinct or is_grouped):
        counts = _divide_limited(num_units, {shard: found.mass for shard, found in masses.items()}, room, rng)
    else:
        counts = divide(num_units, room, rng, is_distinct=True)
    return None if counts is None else {shard: count * unit for shard, count in counts.items()}


def _divide_limited(
    num_units: int, masses: Mapping[int, float], limits: Mapping[int, float], rng: np.random.Generator
) -> dict[int, int] | None:
    """Divides units as ``divide`` does, where no shard gives more than its limit: others give the rest. None if they
    cannot."""
    counts: dict[int, int] = {}
    while num_left := num_units - sum(counts.values()):
        room = {shard: mass for shard, mass in masses.items() if mass > 0 and counts.get(shard, 0) < limits[shard]}
        if not room:
            return None
        for shard, count in divide(num_left, room, rng).items():
            counts[shard] = int(min(counts.get(shard, 0) + count, limits[shard]))
    return counts


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
        masses: Masses of each shard; at least one is above 0.
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
        counts = _divide_distinct(num_units, weights.astype(np.int64), rng)
    else:
        more = np.array([(reserves or {}).get(shard, 0) for shard in shards], np.int64)
        missing = num_units - int(weights.sum())
        extra = _divide_distinct(min(missing, int(more.sum())), more, rng)
        counts = weights.astype(np.int64) + extra
    return {shard: int(count) for shard, count in zip(shards, counts, strict=True) if count}


def _divide_distinct(num_units: int, numbers: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Divides different units, drawn at random among all, by the shard that has them.

    Args:
        numbers: Units of each shard.
    """
    ends = np.cumsum(numbers)
    if not len(ends) or ends[-1] < _MAX_COUNTED_UNITS:
        return rng.multivariate_hypergeometric(numbers, num_units)
    drawn = rng.choice(int(ends[-1]), num_units, replace=False, shuffle=False)  # takes memory for these alone
    return np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(numbers))
