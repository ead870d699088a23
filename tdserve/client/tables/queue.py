"""The handle of a queue: every row is taken, and acknowledged, once."""

from __future__ import annotations

from typing import Any

from tdserve.client.content.padding import Pad
from tdserve.client.tables.sampling import check_num_rows
from tdserve.client.tables.table import TableHandle
from tdserve.client.tables.taking import Taken, TakenBatches, acknowledge, take_rows


class QueueHandle(TableHandle):
    """A queue, or a stack: rows wait in order until they are taken; writers wait while it is full. Threads: safe.

    What was taken is consumed when it is acknowledged, exactly once across all consumers. Rows of a consumer that
    raised, left or died before that stand in front again.
    """

    def take(
        self,
        num_rows: int,
        *,
        max_lag: int | None = None,
        ack: bool = True,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Takes rows, the oldest first (of a stack, the newest).

        Args:
            num_rows: At least 1, at most ``max_size``. Of a closed queue the last ones may be fewer.
            max_lag: Rows whose policy is more versions behind the newest published one leave the queue, counted as
                ``num_discarded`` in ``info()``, and are not returned; what others hold on lease stays theirs.
            ack: True gives a context manager, ``with queue.take(8) as rows``: acknowledged at a clean exit, given back
                on an exception. False gives the rows, to be acknowledged with :meth:`ack`.
            pad: Fills ragged tensors up to the longest, as of ``ReplayHandle.sample``.
            timeout_s: Seconds to wait for so many; None is the client's default, 0 asks once.

        Raises:
            EndOfStreamError: The queue was closed, and everything was taken and acknowledged.
            DeadlineExceededError: There were not enough in time. Nothing was taken.
        """
        num_rows = check_num_rows(num_rows, None)
        deadline = self._client.deadline(timeout_s)

        def draw() -> Any:
            return take_rows(self._client, self._query(max_lag=max_lag, is_lease=True, pad=pad), num_rows, deadline)

        rows = self._following(draw)
        return Taken(self._client, self._query(is_lease=True), rows, None) if ack else rows

    def ack(self, rows: Any, *, timeout_s: float | None = None) -> None:
        """Consumes rows that were taken with ``ack=False``.

        Raises:
            WrongStateError: They are not this client's any more: acknowledged before, or its session was lost and the
                rows were given to others. Nothing was changed.
        """
        acknowledge(self._client, self._query(is_lease=True), rows, self._client.deadline(timeout_s))

    def batches(
        self,
        num_rows: int,
        *,
        max_lag: int | None = None,
        device: Any = None,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> TakenBatches:
        """An iterator that takes rows until the queue is closed and drained; a context manager.

        A batch is acknowledged when the next one is asked for, and given back when the iterator is closed before.

        Args:
            num_rows: Of a batch; the last one of a closed queue may have fewer.
            max_lag: As of :meth:`take`.
            device: Where batches go.
            pad: Fills ragged tensors up to the longest of a batch, as of ``ReplayHandle.sample``.
            timeout_s: Seconds that one batch may take; then the iterator raises DeadlineExceededError.
        """
        num_rows = check_num_rows(num_rows, device)
        seconds = self._client.timeout_s if timeout_s is None else timeout_s
        query = self._query(max_lag=max_lag, is_lease=True, pad=pad)
        return TakenBatches(self._client, query, num_rows, device=device, timeout_s=seconds)
