"""The calls of a queue, which one server has, or several share: their arguments, and what they return."""

from __future__ import annotations

from typing import Any

from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.tables.draws.draw_arguments import Conditions, check_num_rows
from tdserve.client.tables.draws.row_takes import RowTakes
from tdserve.client.tables.draws.taken_batches import TakenBatches


@leave_modes_in_calls
class QueueCalls:
    """The calls of a queue: all of them take rows on lease, which differs between one server and several. Threads:
    safe."""

    _takes: RowTakes
    """Takes rows on lease."""

    def take(
        self,
        num_rows: int,
        *,
        min_rows: int | None = None,
        max_lag: int | None = None,
        ack: bool = True,
        lease_s: float | None = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Takes rows, the oldest first (from a stack, the newest).

        Args:
            num_rows: At least 1, without ``min_rows`` at most ``max_size``. The last batch of a closed queue may have
                fewer.
            min_rows: From this many rows on, as many as can be taken now suffice, up to ``num_rows``; None waits for
                all. 1 takes what is there, and waits only for the first row.
            max_lag: Rows whose policy is more versions behind the newest published one are removed from the queue,
                counted as ``num_discarded`` in ``info()``, and not returned. Rows that are on lease to others stay
                theirs.
            ack: True returns a context manager, ``with queue.take(8) as rows``: the rows are acknowledged at a clean
                exit, and given back on an exception. That end may take the client's default timeout, and not
                ``timeout_s``, since the block may last long. False returns the rows, to be acknowledged with
                :meth:`ack`, whose timeout can be given.
            lease_s: The server gives the rows back to others this many seconds after it has chosen them (the transfer
                included), unless they were acknowledged by then, or their lease was renewed (:meth:`Taken.renew`,
                :meth:`renew`); an acknowledgement that comes later raises WrongStateError. For consumers that may hang.
                None: the lease lasts as long as the session.
            pad: Pads ragged tensors to the longest, as in ``ReplayHandle.sample``.
            numpy: True returns a dict of NumPy arrays; None is the client's setting.
            timeout_s: Seconds to wait for that many (``min_rows``, if given), not for the end of the block; None is the
                client's default, 0 asks once.

        Raises:
            EndOfStreamError: The queue was closed, and everything was taken and acknowledged.
            DeadlineExceededError: There were not enough in time. Nothing was taken.
        """
        num_rows = check_num_rows(num_rows, None)
        conditions = Conditions(max_lag=max_lag).adapt_to_take(num_rows, min_rows, lease_s)
        taken = self._takes.take(num_rows, conditions, timeout_s, pad=pad, numpy=numpy)
        return taken if ack else taken.rows

    def ack(self, rows: Any, *, timeout_s: float | None = None) -> None:
        """Acknowledges rows that were taken with ``ack=False``: they are consumed.

        Args:
            rows: What ``take(n, ack=False)`` has returned, or rows of it with their ``index`` (and ``generation``, so
                that a newer row with the same number is not meant).
            timeout_s: None is the client's default.

        Raises:
            InvalidRequestError: ``rows`` names none. Nothing was changed.
            WrongStateError: This client does not hold them any more: they were acknowledged before, or its session was
                lost, or their ``lease_s`` was over, and they were given to others. Nothing was changed. If this client
                has taken them again since, for another of its threads, they count as acknowledged:
                :meth:`Taken.ack` is only about the rows of its own call.
        """
        self._takes.acknowledge(rows, timeout_s)

    def renew(self, rows: Any, lease_s: float, *, timeout_s: float | None = None) -> None:
        """Renews the lease of rows that were taken with ``lease_s``: it lasts ``lease_s`` seconds from now on.

        The rows that were taken by the same call are renewed with them, also those that are not named.

        Args:
            rows: As for :meth:`ack`.
            lease_s: Seconds.

        Raises:
            WrongStateError: This client does not hold them any more, for example because the lease was over. Nothing
                was changed.
        """
        self._takes.renew(rows, lease_s, timeout_s)

    def batches(
        self,
        num_rows: int,
        *,
        min_rows: int | None = None,
        max_lag: int | None = None,
        lease_s: float | None = None,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> TakenBatches:
        """Returns an iterator that takes rows until the queue is closed and drained; a context manager.

        A batch is acknowledged when the next one is requested, and given back if the iterator is closed before.

        Args:
            num_rows: Rows of a batch; the last one of a closed queue may have fewer.
            min_rows: As for :meth:`take`: batches may have fewer rows if no more are there.
            max_lag: As for :meth:`take`.
            lease_s: As for :meth:`take`, of each batch; the iterator renews it when asked (``batches.renew()``). If it
                is over when the next batch is requested, that raises WrongStateError; the request after it continues.
            device: Where batches are moved.
            pad: Pads ragged tensors to the longest of a batch, as in ``ReplayHandle.sample``.
            numpy: As for :meth:`take`.
            timeout_s: Seconds that one batch may take; after that the iterator raises DeadlineExceededError.
        """
        num_rows = check_num_rows(num_rows, device)
        conditions = Conditions(max_lag=max_lag).adapt_to_take(num_rows, min_rows, lease_s)
        return self._takes.take_batches(num_rows, conditions, timeout_s, device=device, pad=pad, numpy=numpy)
