"""An iterator over batches on lease, of a table or of several shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from types import TracebackType
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    DeadlineExceededError,
    EndOfStreamError,
    TDServeError,
    WrongStateError,
)
from tdserve.client.content.devices import to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_deadline import begin_step
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.tables.draws.taking import LeaseBlock

POLL_S = 0.5
"""How soon a waiting iterator notices that it was closed."""

RETRY_PAUSE_S = 0.1
"""Pause after an attempt that did not reach the server."""


@leave_modes_in_calls
class TakenBatches:
    """An iterator over batches on lease. Each batch is acknowledged when the next one is requested.

    It ends when the table is closed and drained. Closing it gives back what was not acknowledged. So does an exception
    in the loop, at the latest when the iterator is dropped. Threads: one may iterate, any may close it.

    Args:
        take: Takes a batch within some seconds; the last one of a closed table may have fewer rows.
        name: Name of the table, for errors.
        device: Where batches are moved.
        timeout_s: Seconds that one batch may take.
    """

    def __init__(self, take: Callable[[float], LeaseBlock], name: str, *, device: Any, timeout_s: float) -> None:
        self._take, self._name, self._device, self._timeout_s = take, name, device, timeout_s
        self._held: LeaseBlock | None = None
        self._closed = Event()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        deadline = begin_step(self._timeout_s)
        self._acknowledge(deadline)
        while True:
            self._check_open()
            try:
                held = self._take(deadline.limit(POLL_S))
                break
            except EndOfStreamError:
                raise StopIteration from None
            except TDServeError as error:
                self._wait_again(error, deadline)
        try:
            rows = to_device(held.rows, self._device)
        except BaseException:  # they were not returned, and the next call acknowledges what was returned
            held.give_back_later()
            raise
        self._held = held
        if self._closed.is_set():  # by another thread, which found nothing to give back
            self.close()
            self._check_open()
        return rows

    def __enter__(self) -> TakenBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._acknowledge(begin_step(self._timeout_s))
        finally:
            self.close()

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            run_from_finalizer(held.give_back_later)

    def renew(self, lease_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Renews the lease of the batch that was returned last. Any thread may call it, also one that renews again and
        again: between two batches there is nothing to renew, and it does nothing.

        Args:
            lease_s: As in ``tdserve.Taken``.
            timeout_s: As in ``tdserve.Taken``.

        Raises:
            WrongStateError: As in ``tdserve.Taken``.
            ClosedError: The iterator is closed.
        """
        self._check_open()
        held = self._held
        if held is None:
            return
        try:
            held.renew(lease_s, timeout_s=timeout_s)
        except WrongStateError:
            if self._held is held:  # else it was acknowledged in the meantime
                raise

    def close(self) -> None:
        """Ends the iterator, also for a thread that waits in it, and gives back what was not acknowledged."""
        self._closed.set()
        held, self._held = self._held, None
        if held is not None:
            held.give_back()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError(what=f"the iterator over batches of {self._name!r}")

    def _acknowledge(self, deadline: Deadline) -> None:
        held, self._held = self._held, None  # also for close(): rows are not given back while they are acknowledged
        if held is None:
            return
        try:
            held.ack(timeout_s=deadline.limit(self._timeout_s))
        except WrongStateError:  # they are not on lease any more, which does not concern the next batch
            raise
        except BaseException:
            self._held = held
            raise

    def _wait_again(self, error: TDServeError, deadline: Deadline) -> None:
        """Continues after a wait that brought nothing; raises the error if no retry helps, or the time is over."""
        if may_repeat(error, deadline):
            if not isinstance(error, DeadlineExceededError):  # at rest, or away, perhaps only while the server restarts
                self._closed.wait(RETRY_PAUSE_S)
        elif isinstance(error, DeadlineExceededError):
            raise DeadlineExceededError(what=error.what, timeout_s=deadline.timeout_s) from None
        else:
            raise error
