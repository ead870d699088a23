"""Sends the rows of one writer: one thread, one batch under way, and everything that waits goes into the next one.

So rows are stored in the order in which they were appended, even if a batch has to be sent again, and a slower server
gets fewer messages. Several batches under way would give up both.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from enum import Enum
from threading import Condition, RLock, Thread
from typing import Any
from weakref import WeakSet

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    ClosedError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    RequestError,
    WriterFailedError,
)
from tdserve.client.session.calls.call_deadline import begin_step
from tdserve.client.session.process_exit import ExitFlush
from tdserve.client.session.requests.client_mover import ClientMover
from tdserve.client.tables.writers.nstep import NStepWindow
from tdserve.client.tables.writers.row_buffer import NO_VERSION, Batch, Page, RowBuffer
from tdserve.client.tables.writers.row_delivery import Delivery, RowDestination, compute_max_rows
from tdserve.structure.trees.tree import Spec

PROBE_S = 2.0
"""A batch under way for this long may wait for the table's limiter, or for a server that is gone: find out which."""

GIVE_WAY_S = 0.001
"""An actor that computes in Python keeps the interpreter from the sending threads for 5 ms at a time (measured: 17 ms
per batch instead of 1). If batches are not joined, it pauses once per batch, as long as it is ahead."""

JOIN_TIMEOUT_S = 5.0
"""Timeout for the end of a thread that has nothing left to do; it takes milliseconds."""

_STREAMS = itertools.count(1)
"""Numbers of streams, unique in this process; rows of two streams never share a trajectory."""


class _SenderState(Enum):
    OPEN = "open"
    DRAINING = "draining"  # no more appends; what waits is sent
    FAILED = "failed"
    STOPPED = "stopped"


class RowSender:
    """The rows of one writer, from ``put`` to their acknowledgement. Threads: safe.

    Args:
        table: Their table.
        spec: Structure of one row: the table's, or a part of it.
        batch: Rows that are sent together when nothing delays them.
        flush_s: Longest time that a row waits for others; None: until ``flush``.
        max_bytes: Limit for all rows that wait or are under way.
        window: Turns them into n-step rows.

    Attributes:
        num_appended: Rows that were put.
        num_sent: Rows that were passed to the client.
        num_acknowledged: Rows that are stored.
    """

    def __init__(
        self,
        table: RowDestination,
        spec: Spec,
        *,
        batch: int,
        flush_s: float | None,
        max_bytes: int,
        window: NStepWindow | None,
    ) -> None:
        self._table = table
        self._flush_s = math.inf if flush_s is None else flush_s
        self._max_bytes = max_bytes
        self._window = window
        self._num_held = int(window is None or window.n == 1)  # else open rows are held back
        self._buffer = RowBuffer(spec, page_rows=min(batch, compute_max_rows(table)), max_bytes=max_bytes)
        self._batch = self._buffer.page_rows
        joined_bytes = min(ClientMover.max_joined_bytes, max_bytes // 4)  # appends continue in the rest of the memory
        self._delivery = Delivery(table, batch=self._batch, num_joined=joined_bytes // max(spec.nbytes, 1))
        if window is not None and self._buffer.max_rows < window.n + 2 * self._batch:
            reason = f"{max_bytes} bytes do not hold {window.n} rows whose horizon is open, and two batches"
            raise InvalidRequestError(argument="max_bytes", reason=reason)
        self.num_appended = self.num_sent = self.num_acknowledged = 0
        self._num_complete = 0  # all but open n-step rows
        self._flush_to = 0
        self._num_blocked = 0  # callers that wait for room
        self._wake_at: float = math.inf  # the thread sleeps until this many rows are complete
        self._page: Page | None = None  # None: the next row goes through put's slow path
        self._newest: Page | None = None  # None: there is no row of an open trajectory
        self._stream = next(_STREAMS)
        self._sending_since_s = math.inf  # nothing is under way
        self._probed_s = -math.inf
        self._fault: BaseException | None = None
        self._state = _SenderState.OPEN
        self._pid = os.getpid()
        self._make_locks()
        self._thread = Thread(target=self._run, name=f"tdserve-writer-{table.name}-{self._stream}", daemon=True)
        _EXIT_FLUSH.add(self)
        _senders.add(self)
        self._thread.start()

    def put(
        self,
        leaves: list[torch.Tensor],
        values: list[Any],
        values_nbytes: int,
        priority: float,
        timeout_s: float | None,
        policy_version: int = NO_VERSION,
    ) -> None:
        """Copies a row in.

        Args:
            leaves: Tensors in the order of ``spec.tensors``; may change afterwards.
            values: Non-tensor leaves in the order of ``spec.values``; may not.
            values_nbytes: Encoded size of them.
            priority, policy_version: ``NO_PRIORITY`` and ``NO_VERSION`` for none.
            timeout_s: To wait for room, no longer than the block ``within``; None waits without end.

        Raises:
            DeadlineExceededError: There was no room in time. The row was not accepted.
            WriterFailedError: Rows could not be stored; every later call raises it too.
            ClosedError: The writer was closed.
            ForkedClientError: This is a forked child of the process that it belongs to.
        """
        with self._lock:
            page = self._page
            if page is None or values:
                page = self._find_page(values_nbytes, timeout_s)
            now_s = time.monotonic()
            row = page.put(leaves, priority, now_s, values, values_nbytes, policy_version)
            self.num_appended += 1
            self._newest = page
            is_full = page.num_rows == self._batch
            if is_full:
                self._page = None
            if self._window is None:
                self._num_complete += 1
            else:
                num_complete, has_ended = self._window.push(row, values)
                self._num_complete += num_complete
                if has_ended:
                    self._end_trajectory()
            if self._num_complete >= self._wake_at:
                self._wake()
            if now_s - self._sending_since_s > PROBE_S:
                self._probe(now_s)
            if is_full and self._num_complete - self.num_sent > self._batch and not self._delivery.is_coalescing:
                self._progress.wait(GIVE_WAY_S)

    def end_trajectory(self) -> None:
        """Marks the row that was put last as the last of its trajectory.

        Raises:
            WriterFailedError, ClosedError: As ``put``.
        """
        with self._lock:
            self._check_open()
            if self._window is not None:
                self._num_complete += self._window.end()
            self._end_trajectory()

    def flush(self, deadline: Deadline) -> None:
        """Waits until all complete rows are stored.

        Raises:
            DeadlineExceededError: They were not stored in time; they are still under way.
            WriterFailedError, ClosedError: As ``put``.
        """
        with self._lock:
            self._check_open()
            target = self._flush_to = self._num_complete
            self._wake()
            while self.num_acknowledged < target:
                self._wait(deadline, f"the acknowledgement of {target - self.num_acknowledged} rows")

    def close(self, deadline: Deadline) -> None:
        """Flushes all rows, including those with an open horizon, and ends the thread. Idempotent.

        Raises:
            DeadlineExceededError: As raised by ``flush``; the sender is still open.
            WriterFailedError: As ``put``; the next call does nothing.
        """
        with self._lock:
            if self._state is _SenderState.STOPPED:
                return
            try:
                self.flush(deadline)
                while self.num_acknowledged < self.num_appended:  # others may append meanwhile
                    self._num_complete += self._window.end() if self._window is not None else 0
                    self.flush(deadline)
            except WriterFailedError:
                self.stop()
                raise
            self.stop()
        self._thread.join(JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the thread as soon as nothing is under way; drops what waits. Does not wait."""
        with self._lock:
            self._state = _SenderState.STOPPED
            self._page = None
            self._wake()
            self._progress.notify_all()

    def drain(self) -> None:
        """Lets the thread send what is left and then end; does not wait for it."""
        with self._lock:
            if self._state is _SenderState.OPEN:
                self._state = _SenderState.DRAINING
                self._page = None
                self._wake()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)

    def describe_progress(self) -> str:
        """Describes what is under way, for messages."""
        under_way = self.num_sent - self.num_acknowledged
        waiting = self.num_appended - self.num_sent
        return f"{under_way} rows under way and {waiting} waiting, {self._buffer.nbytes} of {self._max_bytes} bytes"

    def _find_page(self, values_nbytes: int, timeout_s: float | None) -> Page:
        """Returns the page for the next row; waits for room."""
        self._check_open()
        page = self._look_for_page(values_nbytes)
        if page is None:
            self._num_blocked += 1
            deadline = begin_step(timeout_s)
            try:
                while page is None:
                    self._wake()
                    self._wait(deadline, "room for a row")
                    page = self._look_for_page(values_nbytes)
            finally:
                self._num_blocked -= 1
        self._page = page
        return page

    def _look_for_page(self, values_nbytes: int) -> Page | None:
        num_open = self.num_appended - self._num_complete  # only further rows complete their horizons
        return self._buffer.find_page(self._stream, values_nbytes, num_held=num_open)

    def _end_trajectory(self) -> None:
        newest, self._newest = self._newest, None
        if newest is None:
            return
        if newest.num_taken == newest.num_rows:  # it was sent without the mark
            self._stream = next(_STREAMS)
            self._page = None
        else:
            newest.ends[newest.num_rows - 1] = True
        self._wake()

    def _make_locks(self) -> None:
        # Reentrant: the garbage collector may end a dropped writer within this very thread.
        self._lock = RLock()
        self._work = Condition(self._lock)
        self._progress = Condition(self._lock)

    def _begin_in_child(self) -> None:
        """Refuses further rows in a forked child: no thread sends them there, and another thread may have had the
        lock."""
        self._make_locks()
        self._page = None

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClientError(what=f"the writer of {self._table.name!r}", pid=self._pid)
        if self._fault is not None:
            raise WriterFailedError(
                store=self._table.name,
                num_acknowledged=self.num_acknowledged,
                num_unknown=self.num_sent - self.num_acknowledged,
                num_unsent=self.num_appended - self.num_sent,
                reason=str(self._fault),
            ) from self._fault
        if self._state is not _SenderState.OPEN or not self._thread.is_alive():
            raise ClosedError(what=f"the writer of {self._table.name!r}")

    def _wake(self) -> None:
        self._wake_at = math.inf
        self._work.notify()

    def _wait(self, deadline: Deadline, what: str) -> None:
        """Waits for any progress. Raises if there was none in time, or can be none."""
        if deadline.expired:
            what = f"{what} (writer of table {self._table.name!r}: {self.describe_progress()})"
            raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
        self._progress.wait(deadline.limit(PROBE_S))
        self._check_open()
        now_s = time.monotonic()
        if now_s - self._sending_since_s > PROBE_S:
            self._probe(now_s)

    def _fail(self, fault: BaseException) -> None:
        if self._fault is None and self._state is not _SenderState.STOPPED:
            self._fault = fault
            self._state = _SenderState.FAILED
            self._page = None
            self._wake()
            self._progress.notify_all()

    def _count_due(self, now_s: float) -> int:
        """Counts the rows to send now.

        The newest row of a trajectory is held back while it may turn out to be the last.
        """
        num_complete = self._num_complete - self.num_sent
        is_asked = self._num_blocked or self._flush_to > self.num_sent or self._state is _SenderState.DRAINING
        if not num_complete or is_asked:
            return num_complete
        newest = self._newest
        num_free = num_complete
        if newest is not None and self._num_complete == self.num_appended:
            num_free -= 1
        if num_free >= self._batch:
            return num_free
        if now_s - self._buffer.oldest_s < self._flush_s:
            return 0
        is_old = newest is None or now_s - newest.times_s[newest.num_rows - 1] >= self._flush_s
        return num_complete if is_old else num_free

    def _run(self) -> None:
        try:
            batch = self._take_next_batch()
            while batch is not None:
                self._send(batch)
                batch = self._take_next_batch()
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the next append raises it)
            with self._lock:
                self._fail(error)

    def _take_next_batch(self) -> Batch | None:
        """Waits until there are rows to send; None if there will be none."""
        with self._lock:
            while True:
                if self._state is _SenderState.DRAINING and self._window is not None:
                    self._num_complete += self._window.end()
                if self._state in (_SenderState.STOPPED, _SenderState.FAILED):
                    return None
                now_s = time.monotonic()
                num_due = self._count_due(now_s)
                if num_due:
                    batch = self._buffer.take(min(num_due, self._delivery.max_rows))
                    self.num_sent += batch.num_rows
                    self._sending_since_s = now_s
                    self._progress.notify_all()  # joined rows have left the buffer
                    return batch
                if self._state is _SenderState.DRAINING:
                    return None
                sleep_s = self._buffer.oldest_s + self._flush_s - now_s
                is_timed = sleep_s < math.inf and self._num_complete > self.num_sent
                num_rows = 1 if self._flush_s < math.inf and not is_timed else self._batch + self._num_held
                self._wake_at = self.num_sent + num_rows
                self._work.wait(sleep_s if is_timed else None)
                self._wake_at = math.inf

    def _send(self, batch: Batch) -> None:
        try:
            self._delivery.send(batch, self._count_stored)
        except (RequestError, CapacityError) as error:
            with self._lock:
                self.num_sent = self.num_acknowledged  # refused: nothing was changed
                self._fail(error)
            return
        with self._lock:
            self._sending_since_s = math.inf
            self._buffer.give_back(batch)
            self._progress.notify_all()

    def _count_stored(self, num_rows: int) -> None:
        with self._lock:
            self.num_acknowledged += num_rows
            self._sending_since_s = time.monotonic()
            self._progress.notify_all()

    def _probe(self, now_s: float) -> None:
        """Checks the server in another thread: the answer may take as long as the client waits for a server."""
        if now_s - self._probed_s > PROBE_S:
            self._probed_s = math.inf  # one check at a time
            Thread(target=self._ask, name=f"tdserve-writer-probe-{self._table.name}", daemon=True).start()

    def _ask(self) -> None:
        with self._lock:
            asked_at = self.num_acknowledged
        fault: BaseException | None = None
        try:
            self._table.info()
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the next append raises it)
            fault = error
        with self._lock:
            self._probed_s = time.monotonic()
            if fault is not None and self.num_acknowledged == asked_at:
                self._fail(fault)


_senders: WeakSet[RowSender] = WeakSet()


def _begin_all_in_child() -> None:
    for sender in list(_senders):
        sender._begin_in_child()


os.register_at_fork(after_in_child=_begin_all_in_child)


def _join_until(sender: RowSender, end_s: float) -> None:
    sender.join(max(end_s - time.monotonic(), 0.0))


_EXIT_FLUSH = ExitFlush(_join_until, begin=RowSender.drain)
"""Ends all senders: threads that send while the interpreter exits would abort the process."""
