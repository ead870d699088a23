"""When a writer that keeps extending a table gets another claim.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_CLAIM_EXTENDS = 4
"""Extends of one writer before it counts as one that keeps writing."""

MAX_PAUSE = 4096
"""Most extends between two claims, where other writers end claims before they are worth it."""

MIN_EXTENDS = 8
"""A claim was worth it if this many extends used it."""


@dataclass
class ClaimPacing:
    """Counts the extends that a writer makes without a claim, and decides when it is time for one.

    The writer is the handle of a local client, which then requests a claim, or a data worker, which is then offered
    one.
    """

    _pause: int = FIRST_CLAIM_EXTENDS
    _num_left: int = FIRST_CLAIM_EXTENDS

    def count_extend(self) -> bool:
        """Counts an extend without a claim, and returns whether it is time for one."""
        self._num_left -= 1
        return self._num_left <= 0

    def on_granted(self) -> None:
        """Takes note of a claim. If it is lost instead of ended, the pause before the next one has begun."""
        self._num_left = self._pause

    def on_refused(self) -> None:
        """Takes note that there was no claim when it was time: the pause after the next one is longer."""
        self._num_left = self._pause
        self._lengthen()

    def on_ended(self, *, was_worth_it: bool, is_next_due: bool) -> None:
        """Takes note that a claim has ended.

        Args:
            was_worth_it: Whether the next pauses are short again; else they are longer.
            is_next_due: Whether it is time for another claim with the next extend, without a pause.
        """
        if was_worth_it:
            self._pause = FIRST_CLAIM_EXTENDS
        else:
            self._lengthen()
        self._num_left = 1 if is_next_due else self._pause

    def _lengthen(self) -> None:
        self._pause = min(2 * self._pause, MAX_PAUSE)
