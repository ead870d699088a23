"""Rows that only one writer may fill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tdserve.messages.row_numbers import Rows, encode_many


@dataclass(frozen=True, eq=False)
class Reservation:
    """Rows that only one writer may fill.

    Attributes:
        num: Number of this reservation, counted since the start or restart of the ring.
        rows: Place of row i of the content. Their generations are odd from the reservation to the commit.
        evicted: Those of ``rows`` that were live, and are not any more.
    """

    num: int
    rows: Rows
    evicted: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def encoded(self) -> bytes:
        """The row numbers in the form of messages and the catalog."""
        return encode_many(self.rows)
