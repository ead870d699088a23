"""Rows that one writer, and nobody else, may fill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tdserve.messages.row_numbers import encode_rows
from tdserve.rules.replay.live_rows import Rows


@dataclass(frozen=True, eq=False)
class Reservation:
    """Rows that one writer, and nobody else, may fill.

    Attributes:
        num: Counts reservations of this ring since its start or restart.
        rows: Where row i of the content goes. Odd since the reservation, until the commit.
        evicted: Those of ``rows`` that were live, and are no more.
    """

    num: int
    rows: Rows
    evicted: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def encoded(self) -> bytes:
        """The row numbers as messages and the catalog carry them."""
        return encode_rows(self.rows)
