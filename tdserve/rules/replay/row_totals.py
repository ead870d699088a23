"""How many rows have come to a table, and how many were sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdserve.rules.replay.allocation.ring import Ring
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers
from tdserve.rules.replay.limiter import LimiterCounts


class RowTotals:
    """Counts of the rows that have come to a table, and of those that were sampled: in all, since the table was last
    cleared, and since the counts were last reset.

    Args:
        ring: Counts the rows that come.
        shared: Counts the rows that are sampled.
        state: As from :meth:`get_state`; {}: of a new table.

    Attributes:
        num_clears: How often the table was cleared since it was opened.
    """

    def __init__(self, ring: Ring, shared: SharedNumbers, state: Mapping[str, Any]) -> None:
        self._ring, self._shared = ring, shared
        # The record is of the last write; the shared number may be older, after a loss of power.
        shared.num_sampled = max(shared.num_sampled, int(state.get("samples", 0)))
        self._cleared = (int(state.get("cleared_inserts", 0)), int(state.get("cleared_samples", 0)))
        self._reset_inserts = int(state.get("reset_inserts", 0))
        self.num_clears = 0

    @property
    def num_samples(self) -> int:
        """Rows ever sampled."""
        return self._shared.num_sampled + self._shared.num_drawn

    @property
    def inserts(self) -> int:
        """Rows ever committed, or since the counts were last reset."""
        return self._ring.inserts - self._reset_inserts

    def get_counts(self, num_spent: int) -> LimiterCounts:
        """Returns the counts for the limiter, which start again when the table is cleared.

        Args:
            num_spent: Rows that leave as soon as their draw is forgotten.
        """
        ring, (inserts, samples) = self._ring, self._cleared
        return LimiterCounts(
            num_rows=len(ring) - num_spent,
            inserts=ring.inserts - inserts,
            samples=self.num_samples - samples,
            capacity=ring.capacity,
            reserved=ring.num_reserved,
            num_spent=num_spent,
        )

    def count_samples(self, num_rows: int) -> None:
        """Counts rows as sampled."""
        self._shared.num_sampled += num_rows

    def uncount_samples(self, num_rows: int) -> None:
        """Undoes :meth:`count_samples`."""
        self._shared.num_sampled -= num_rows

    def uncount_sample(self, num_rows: int, num_clears: int) -> None:
        """Undoes the count of one sample.

        Args:
            num_rows: Rows of the sample.
            num_clears: Number of clears when it was drawn; a later clear has already dropped it.
        """
        self.uncount_samples(num_rows)
        if num_clears != self.num_clears:
            inserts, samples = self._cleared
            self._cleared = (inserts, samples - num_rows)

    def clear(self, *, resets_inserts: bool = False) -> None:
        """Lets the limiter start again; with ``resets_inserts`` also :attr:`inserts`."""
        self._cleared = (self._ring.inserts, self.num_samples)
        self.num_clears += 1
        if resets_inserts:
            self._reset_inserts = self._ring.inserts

    def get_state(self) -> dict[str, int]:
        """Returns the state that neither the ring nor the shared numbers have for certain after a loss of power."""
        inserts, samples = self._cleared
        return {
            "samples": self._shared.num_sampled,
            "cleared_inserts": inserts,
            "cleared_samples": samples,
            "reset_inserts": self._reset_inserts,
        }
