"""A replay table's decisions: ring, sampler, limiter and counters joined. Content and waiting are the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tdserve.errors import InvalidRequestError, SelectionError
from tdserve.replay.limiter import Counts
from tdserve.replay.live_rows import LiveRows, Rows
from tdserve.replay.ring import Reservation, Ring
from tdserve.replay.settings import Settings


@dataclass(frozen=True, eq=False)
class RowsPlan:
    """Rows to read.

    Attributes:
        rows: Row numbers, in the order of the result.
        generations: As they are now; whoever copies a row checks that its generation did not move meanwhile.
    """

    rows: Rows
    generations: Rows


class Table:
    """Decides for one replay table. Whoever gets ``None`` waits until :meth:`commit`, :meth:`abort` or
    :meth:`release` was called, and asks again.

    Args:
        name: Of the store, for errors.
        capacity: Rows.
        generations: One int64 per row, written in place.
        settings: Sampler, remover and limiter.

    Raises:
        InvalidRequestError: The capacity is below 1, or the limiter would never let a sample through.
    """

    def __init__(self, name: str, capacity: int, generations: Rows, settings: Settings) -> None:
        self._take(name, Ring(capacity, generations), generations, settings)

    @classmethod
    def restore(
        cls,
        name: str,
        generations: Rows,
        settings: Settings,
        state: Mapping[str, int],
        *,
        now_reserved: Sequence[Rows] = (),
    ) -> Table:
        """A table as it was. Arguments and errors as of :meth:`Ring.restore`; there is a row per generation."""
        table = cls.__new__(cls)
        ring = Ring.restore(len(generations), generations, state, now_reserved=now_reserved)
        table._take(name, ring, generations, settings)
        table._samples = state.get("samples", 0)
        return table

    def _take(self, name: str, ring: Ring, generations: Rows, settings: Settings) -> None:
        settings.limiter.check(ring.capacity)
        self.name = name
        self.settings = settings
        self.ring = ring
        self._generations: Rows = np.asarray(generations)
        self._samples = 0
        self._live = LiveRows(ring.capacity)
        self._live.add(ring.live_rows())

    def __len__(self) -> int:
        return len(self.ring)

    def __repr__(self) -> str:
        return f"<Table {self.name!r} {self.ring!r}>"

    @property
    def counts(self) -> Counts:
        """What the limiter looks at."""
        return Counts(len(self.ring), self.ring.inserts, self._samples, self.ring.capacity)

    def plan_extend(self, num_rows: int) -> Reservation | None:
        """Rows for a writer, or ``None`` when it must wait. They are out of every sample from now on.

        Raises:
            InvalidRequestError: ``num_rows`` is below 1.
            CapacityError: ``num_rows`` is above the capacity.
        """
        if num_rows <= self.ring.capacity and not self.settings.limiter.can_insert(self.counts, num_rows):
            return None
        reservation = self.ring.reserve(num_rows)
        if reservation is not None and len(reservation.evicted):
            self._live.remove(reservation.evicted)
        return reservation

    def commit(self, reservation: Reservation) -> Rows:
        """Makes a writer's rows visible, and returns their generations.

        Raises:
            WrongStateError: As of :meth:`Ring.commit`.
        """
        generations = self.ring.commit(reservation)
        self._live.add(reservation.rows)
        return generations

    def abort(self, reservation: Reservation) -> None:
        """As :meth:`Ring.abort`."""
        self.ring.abort(reservation)

    def quarantine(self, reservation: Reservation) -> None:
        """As :meth:`Ring.quarantine`."""
        self.ring.quarantine(reservation)

    def release(self, reservation: Reservation) -> None:
        """As :meth:`Ring.release`."""
        self.ring.release(reservation)

    def plan_sample(self, num_rows: int, num_batches: int = 1, *, rng: np.random.Generator) -> RowsPlan | None:
        """Draws rows for some batches at once, or ``None`` when the limiter makes the caller wait.

        Args:
            num_rows: Rows of one batch.
            num_batches: Their rows follow one another in the plan.
            rng: Source of randomness.

        Raises:
            InvalidRequestError: A number is below 1.
        """
        for argument, value in (("num_rows", num_rows), ("num_batches", num_batches)):
            if value < 1:
                raise InvalidRequestError(argument=argument, reason=f"{value} is not at least 1")
        total = num_rows * num_batches
        if not self._live or not self.settings.limiter.can_sample(self.counts, total):
            return None
        rows = self.settings.sampler.draw(self._live, total, rng=rng)
        self._samples += total
        return RowsPlan(rows, self._generations[rows])

    def plan_read(self, rows: Rows) -> RowsPlan:
        """Live rows by number, without counting as a sample.

        Args:
            rows: Row numbers, as ``extend`` returned them; negative ones do not count from the end.

        Raises:
            SelectionError: A row is out of range, or not live: never written, or being overwritten.
        """
        if len(rows):
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.ring.capacity:
                bad = low if low < 0 else high
                reason = f"table {self.name!r} has rows 0 to {self.ring.capacity - 1}"
                raise SelectionError(selection=str(bad), reason=reason)
            is_live = self._live.contains(rows)
            if not is_live.all():
                bad = int(rows[int(np.argmin(is_live))])
                raise SelectionError(selection=str(bad), reason=f"this row of table {self.name!r} is not live now")
        return RowsPlan(rows, self._generations[rows])

    def live_rows(self) -> Rows:
        """Numbers of the rows that may be read, sorted."""
        return self._live.rows()

    def why(self) -> str:
        """What a sample waits for now, for the error of one that waited too long."""
        return self.settings.limiter.why(self.counts, self.name)

    def state(self) -> dict[str, int]:
        """What the generations do not tell and :meth:`restore` needs."""
        return {**self.ring.state(), "samples": self._samples}

    def info(self) -> dict[str, int | str]:
        """Figures for users and statistics."""
        return {
            "num_rows": len(self.ring),
            "capacity": self.ring.capacity,
            "num_reserved": self.ring.num_reserved,
            "num_holes": self.ring.num_holes,
            "cursor": self.ring.cursor,
            "inserts": self.ring.inserts,
            "samples": self._samples,
            "settings": self.settings.to_json(),
        }
