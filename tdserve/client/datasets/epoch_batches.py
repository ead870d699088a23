"""A reader's share of an epoch, which is read ahead."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any
from weakref import WeakSet

from tdserve.base.errors import ClosedError, ForkedClientError, TDServeError
from tdserve.base.integers import check_integer
from tdserve.client.content.devices import Upload, begin
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.cancellation import Cancellation
from tdserve.client.session.process_exit import call_before_executors_end
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.samplers.epochs import EpochOrder, compute_share
from tdserve.rules.replay.samplers.sampler import make_epoch_order

NUM_THREADS = 2
"""While the rows of one batch arrive, those of the next are gathered."""

CHUNK_ROWS = 8192
"""Rows of an order that are computed at once: fewer cost nearly as much."""


@dataclass(frozen=True)
class EpochPlan:
    """Which rows make up which batch.

    Attributes:
        order: Order of the whole epoch.
        share: The positions in it that this reader visits.
        num_rows: Rows of a batch.
    """

    order: EpochOrder
    share: range
    num_rows: int

    def __len__(self) -> int:
        return (len(self.share) + self.num_rows - 1) // self.num_rows

    def iter_batches(self, start: int) -> Iterator[slice | Rows]:
        """Yields the rows of each batch from number ``start`` on."""
        step = max(CHUNK_ROWS // self.num_rows, 1) * self.num_rows
        for at in range(start * self.num_rows, len(self.share), step):
            places = self.share[at : at + step]
            rows = self.order.list_rows(places.start, places.stop)
            for first in range(0, len(places), self.num_rows):
                if isinstance(rows, slice):
                    yield slice(places.start + first, min(places.start + first + self.num_rows, places.stop))
                else:
                    yield rows[first : first + self.num_rows]


def plan_epoch(
    total_rows: int, num_rows: int, *, sampler: Any, epoch: int, rank: int, world_size: int, drop_last: bool
) -> EpochPlan:
    """Returns the batches of one reader; arguments and errors as in ``StoreHandle.batches``.

    Args:
        total_rows: Rows of the dataset.
    """
    num_rows = check_integer("num_rows", num_rows, 1)
    order = make_epoch_order(sampler, total_rows, epoch=epoch)
    share = compute_share(total_rows, rank=rank, world_size=world_size)
    return EpochPlan(order, share[: total_rows // world_size // num_rows * num_rows] if drop_last else share, num_rows)


@leave_modes_in_calls
class EpochBatches:
    """An iterator over the batches of one epoch; a context manager. Threads: one caller at a time.

    Dropping it ends it, as closing it does. It belongs to one process; each makes its own.

    Raises (from ``next``):
        TDServeError: A batch could not be read. The next call retries the same batch.
        ClosedError: The iterator was closed.
    """

    def __init__(
        self, name: str, read: Callable[[Any], Any], plan: EpochPlan, *, start: int, prefetch: int, device: Any
    ) -> None:
        prefetch, start = check_integer("prefetch", prefetch, 1), check_integer("start", start, 0)
        self._what = what = f"the iterator over batches of {name!r}"
        self._pid = os.getpid()
        self._num_batches = max(len(plan) - start, 0)
        self._coming = plan.iter_batches(start)
        self._prefetch = prefetch
        self._under_way: deque[tuple[Any, Future[Upload]]] = deque()
        self._closed = closed = Event()

        def fetch(rows: Any) -> Upload:
            if closed.is_set():
                raise ClosedError(what=what)
            with _watch_read():
                return begin(read(rows), device)

        self._fetch = fetch
        threads = ThreadPoolExecutor(min(prefetch, NUM_THREADS), thread_name_prefix=f"tdserve-epoch-{name}")
        self._threads = threads
        self._finalizer = weakref.finalize(self, _end, threads, closed)
        self._finalizer.atexit = False  # end_all does it, before the threads are waited for
        _open.add(self)
        call_before_executors_end(end_all)

    def __len__(self) -> int:
        """Returns the number of batches in all, from the first that this iterator returns."""
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise ForkedClientError(what=self._what, pid=self._pid)
        if self._closed.is_set():
            raise ClosedError(what=self._what)
        self._ask_ahead()
        if not self._under_way:
            raise StopIteration
        rows, future = self._under_way[0]
        try:
            upload = future.result()
        except (TDServeError, CancelledError) as error:
            if self._closed.is_set():
                raise ClosedError(what=self._what) from error
            self._under_way[0] = rows, self._begin(rows)
            raise
        self._under_way.popleft()
        self._ask_ahead()
        return upload.take()

    def _ask_ahead(self) -> None:
        while len(self._under_way) < self._prefetch and (rows := next(self._coming, None)) is not None:
            self._under_way.append((rows, self._begin(rows)))

    def _begin(self, rows: Any) -> Future[Upload]:
        try:
            return self._threads.submit(self._fetch, rows)
        except RuntimeError as error:  # closed in the meantime, or the interpreter exits
            raise ClosedError(what=self._what) from error

    def __enter__(self) -> EpochBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iterator without waiting for what is under way. Idempotent; any thread may call it."""
        self._finalizer()


_open: WeakSet[EpochBatches] = WeakSet()

_reads: set[Cancellation] = set()
"""One for each read under way, also of iterators that were dropped."""


@contextmanager
def _watch_read() -> Iterator[None]:
    """A block whose requests are given up at the exit of the process."""
    cancellation = Cancellation()
    _reads.add(cancellation)
    try:
        with cancellation.watch():
            yield
    finally:
        _reads.discard(cancellation)


def end_all() -> None:
    """Ends all iterators, and what they read: the exit waits for their threads, and they perhaps for a server."""
    for batches in list(_open):
        batches.close()
    for cancellation in list(_reads):
        cancellation.cancel()


def _forget_all() -> None:
    _open.clear()  # their threads do not exist in a forked child
    _reads.clear()


os.register_at_fork(after_in_child=_forget_all)


def _end(threads: ThreadPoolExecutor, closed: Event) -> None:
    closed.set()
    threads.shutdown(wait=False, cancel_futures=True)
