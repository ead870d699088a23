"""What queues and replays share: rows are taken on lease."""

from __future__ import annotations

from typing import Any

from tdserve.client.content.padding import Pad
from tdserve.client.tables.draw_arguments import Conditions
from tdserve.client.tables.table_handle import TableHandle
from tdserve.client.tables.taken_batches import TakenBatches
from tdserve.client.tables.taking import Taken, take_rows


class LeasingTableHandle(TableHandle):
    """A table from which rows are taken on lease."""

    def _take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> Taken:
        """Takes rows; arguments, which were checked, and errors as of ``take``."""
        deadline = self._client.make_deadline(timeout_s)

        def draw() -> Taken:
            query = self.make_query(conditions, is_lease=True, pad=pad, numpy=numpy, deadline=deadline)
            return Taken(self._client, query, take_rows(self._client, query, num_rows, deadline))

        return self.follow_and_retry(draw, deadline)

    def _take_batches(
        self,
        num_rows: int,
        conditions: Conditions,
        timeout_s: float | None,
        *,
        device: Any,
        pad: Pad,
        numpy: bool | None,
    ) -> TakenBatches:
        """Returns an iterator over batches that ``_take`` takes; what no batch can be is refused here."""
        deadline = self._client.make_deadline(timeout_s)
        query = self.make_query(conditions, is_lease=True, pad=pad, device=device, numpy=numpy, deadline=deadline)

        def take(within_s: float) -> Taken:
            return self._take(num_rows, conditions, within_s, pad=pad, numpy=query.is_numpy)

        seconds = self._client.timeout_s if timeout_s is None else timeout_s
        return TakenBatches(take, self.name, device=device, timeout_s=seconds)
