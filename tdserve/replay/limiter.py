"""Who must wait. A limiter is a setting and decides from counts alone, so that it can be asked after every change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tdserve.errors import InvalidRequestError


@dataclass(frozen=True)
class Counts:
    """What a limiter may look at.

    Attributes:
        num_rows: Live rows.
        inserts: Rows ever committed.
        samples: Rows ever sampled.
        capacity: Rows that fit.
    """

    num_rows: int
    inserts: int
    samples: int
    capacity: int


@dataclass(frozen=True)
class MinSize:
    """Samples wait until the table has enough rows; writers never wait.

    Attributes:
        min_size: Live rows, at least 1: from nothing nothing can be drawn.
    """

    min_size: int = 1

    kind: ClassVar[str] = "min_size"

    def __post_init__(self) -> None:
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, int) or self.min_size < 1:
            raise InvalidRequestError(argument="min_size", reason=f"{self.min_size!r} is not an integer of at least 1")

    def check(self, capacity: int) -> None:
        """Refuses a setting under which no sample could ever be drawn.

        Raises:
            InvalidRequestError: ``min_size`` is above the capacity.
        """
        if self.min_size > capacity:
            reason = f"{self.min_size} rows never fit into a capacity of {capacity}, so no sample could be drawn"
            raise InvalidRequestError(argument="min_size", reason=reason)

    def can_sample(self, counts: Counts, num_rows: int) -> bool:
        """Whether ``num_rows`` may be drawn now."""
        return counts.num_rows >= self.min_size

    def can_insert(self, counts: Counts, num_rows: int) -> bool:
        """Whether ``num_rows`` may be reserved now."""
        return True

    def why(self, counts: Counts, table: str) -> str:
        """What a sample waits for, for the error of one that waited too long."""
        return f"a sample of table {table!r}, which has {counts.num_rows} rows and needs min_size {self.min_size},"


Limiter = MinSize
"""Every limiter there is: a frozen dataclass with ``kind``, ``check``, ``can_sample``, ``can_insert`` and ``why``."""
