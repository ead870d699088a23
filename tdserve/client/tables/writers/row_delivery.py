"""Stores a writer's batches: decides how many rows to send at once, and splits batches that are too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tdserve.base.errors import CapacityError, InvalidRequestError
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.writers.row_buffer import Batch
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.captured import Captured
from tdserve.structure.trees.tree import Spec

MIN_RING_BATCHES = 16
"""Joined rows fill at most one part in this many of a ring: rows that are being overwritten cannot be read."""


class RowDestination(Protocol):
    """The table that rows are written to; a ReplayHandle has these calls."""

    name: str
    capacity: int
    spec: Spec
    settings: Settings

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> Any:
        """Stores rows together, and returns when they are stored."""

    def info(self) -> dict[str, Any]:
        """Returns figures of the table; raises if the server cannot be reached for as long as its client waits."""


def compute_max_rows(table: RowDestination) -> int:
    """Returns the largest number of rows of a batch."""
    return table.settings.limiter.compute_max_batch_rows(table.capacity)


class Delivery:
    """Stores batches, one at a time.

    Args:
        table: The table.
        batch: Rows that the owner of the writer sends together.
        num_joined: Rows that are worth sending together.
    """

    def __init__(self, table: RowDestination, *, batch: int, num_joined: int) -> None:
        self._table = table
        self._batch = batch
        self._most = max(batch, min(num_joined, table.capacity // MIN_RING_BATCHES))

    @property
    def is_coalescing(self) -> bool:
        """Whether waiting batches are joined into one."""
        return self._table.settings.may_join_extends

    @property
    def max_rows(self) -> int:
        """Largest number of rows of the next batch."""
        return self._most if self.is_coalescing else min(self._most, self._batch)

    def send(self, batch: Batch, on_stored: Callable[[int], None]) -> None:
        """Stores the rows of a batch in order; in smaller and smaller calls if the table refuses that many at once.

        Waits as long as the table makes writers wait, or the server is away; the caller decides when that is too long.

        Args:
            on_stored: Called with the number of rows after each call that stored some, until all are stored.

        Raises:
            RequestError, CapacityError: The table refuses; the other rows were not stored.
            TDServeError: Some of the other rows may have been stored.
        """
        start = 0
        while start < batch.num_rows:
            num_rows = min(self._most, batch.num_rows - start)
            try:
                self._extend(batch, slice(start, start + num_rows))
            except (InvalidRequestError, CapacityError):
                if num_rows == 1:
                    raise
                self._most = num_rows // 2
                continue
            on_stored(num_rows)
            start += num_rows

    def _extend(self, batch: Batch, rows: slice) -> None:
        annotations = RowAnnotations(
            priority=None if batch.priorities is None else batch.priorities[rows],
            ends=batch.ends[rows] if batch.ends is not None and batch.ends[rows].any() else None,
            writer=batch.stream,
            policy_version=None if batch.policy_versions is None else batch.policy_versions[rows],
        )
        self._table.extend_captured(batch.cut(rows), annotations, timeout_s=math.inf)
