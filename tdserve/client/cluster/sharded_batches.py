"""Rows on lease from several shards, and iterators over batches of them."""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, EndOfStreamError, TDServeError
from tdserve.client.cluster.drawn_parts import DrawnPart
from tdserve.client.cluster.shard_draws import ShardDraws
from tdserve.client.cluster.sharded_table import ShardedTable
from tdserve.client.content.devices import to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.tables.change_requests import to_row_numbers
from tdserve.client.tables.taking import POLL_S, Lease, acknowledge, give_back_later, name_rows, wait_again

JOIN_TIMEOUT_S = 5.0


@leave_modes_in_calls
class ShardedTaken:
    """Rows on lease, as a context manager: acknowledged at a clean exit, given back if the block raises; see
    ``tdserve.Taken``. The rows of each shard are acknowledged together."""

    def __init__(
        self, table: ShardedTable, draws: ShardDraws, drawn: list[DrawnPart], *, timeout_s: float | None
    ) -> None:
        self._table, self._draws, self._drawn, self._timeout_s = table, draws, drawn, timeout_s
        self._query = drawn[0].query
        self._names = [name_rows(part.rows) for part in drawn]
        self._unseen = weakref.finalize(self, _give_back_later, drawn, self._names)
        self._unseen.atexit = False  # with its sessions the rows are free
        self._rows: Any = None
        try:
            self._rows = draws.join(drawn).build()
        except TDServeError:
            self.give_back()
            raise

    @property
    def rows(self) -> Any:
        """The tensordict, or dict of arrays. From now on the caller must acknowledge the rows or give them back."""
        self._unseen.detach()
        return self._query.hand_over(self._rows)

    def __enter__(self) -> Any:
        return self.rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.ack()
        else:
            self.give_back()

    def ack(self, deadline: Deadline | None = None) -> None:
        """Acknowledges the rows of each shard, at the same time. Raises WrongStateError if this client does not hold
        those of one.

        Args:
            deadline: None: the timeout of the call that took them begins again.
        """
        self._unseen.detach()
        until = deadline or self._table.make_deadline(self._timeout_s)
        held: dict[int, list[tuple[DrawnPart, Lease]]] = {}
        for part, names in zip(self._drawn, self._names, strict=True):
            held.setdefault(part.shard, []).append((part, names))

        def act(shard: int, _: Any) -> None:
            for part, names in held[shard]:
                acknowledge(part.client, part.query, names, until)

        def explain_done(shards: list[int]) -> str:
            counts = {shard: sum(len(to_row_numbers(names.rows)) for _, names in each) for shard, each in held.items()}
            return self._table.explain_done("acknowledged", counts, shards)

        self._table.ask_each(held, act, deadline=until, explain_done=explain_done)

    def give_back_later(self) -> None:
        """Gives the rows back from another thread; for finalizers."""
        self._unseen.detach()
        _give_back_later(self._drawn, self._names)

    def give_back(self) -> None:
        """Gives the rows back to others."""
        self._unseen.detach()
        self._draws.give_back(self._drawn, self._table.make_deadline(None), self._names)


def _give_back_later(drawn: list[DrawnPart], names: list[Lease]) -> None:
    """Gives rows back from other threads; for finalizers."""
    for part, named in zip(drawn, names, strict=True):
        give_back_later(part.client, part.query, named)


@leave_modes_in_calls
class ShardedTakenBatches:
    """An iterator over batches on lease, each acknowledged when the next one is requested; see
    ``tdserve.TakenBatches``.

    Args:
        take: Takes a batch within some seconds.
        name: Of the table, for errors.
    """

    def __init__(self, take: Callable[[float], Any], name: str, *, device: Any, timeout_s: float) -> None:
        self._take, self._name, self._device, self._timeout_s = take, name, device, timeout_s
        self._held: ShardedTaken | None = None
        self._closed = Event()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        deadline = Deadline.after(self._timeout_s)
        self._acknowledge(deadline)
        while True:
            if self._closed.is_set():
                raise ClosedError(what=f"the iterator over batches of {self._name!r}")
            try:
                self._held = self._take(deadline.limit(POLL_S))
            except EndOfStreamError:
                raise StopIteration from None
            except TDServeError as error:
                wait_again(error, deadline, self._closed)
                continue
            return to_device(self._held.rows, self._device)

    def __enter__(self) -> ShardedTakenBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._acknowledge(Deadline.after(self._timeout_s))
        self.close()

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            held.give_back_later()

    def close(self) -> None:
        """Ends the iterator, also for a thread that waits in it, and gives back what was not acknowledged."""
        self._closed.set()
        held, self._held = self._held, None
        if held is not None:
            held.give_back()

    def _acknowledge(self, deadline: Deadline) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.ack(deadline)


@leave_modes_in_calls
class ShardedBatches:
    """An iterator over samples that a thread draws ahead; a context manager. It ends as ``Batches`` does.

    Args:
        draw: Draws the batch of a number, from 0.
        name: Of the table, for errors.
        prefetch: Batches that wait, at most.
        drop_after_s: A batch that has waited longer is dropped; None: none.
    """

    def __init__(self, draw: Callable[[int], Any], name: str, *, prefetch: int, drop_after_s: float | None) -> None:
        self._name = name
        self._drop_after_s = math.inf if drop_after_s is None else drop_after_s
        self._closed = Event()
        self._is_over = False
        self._ready: Queue[Any] = Queue(maxsize=prefetch)
        self._thread = Thread(
            target=_fill, args=(draw, self._ready, self._closed), name=f"tdserve-batches-{name}", daemon=True
        )
        weakref.finalize(self, self._closed.set)
        _RUNNING[self._thread] = self._closed
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._is_over:
            if self._closed.is_set():
                raise ClosedError(what=f"the iterator over batches of {self._name!r}")
            try:
                came_s, item = self._ready.get(timeout=POLL_S)
            except Empty:
                if not self._thread.is_alive():
                    raise ClosedError(what=f"the iterator over batches of {self._name!r}") from None
                continue
            if isinstance(item, EndOfStreamError):
                self._is_over = True
                continue
            if isinstance(item, BaseException):
                raise item
            if time.monotonic() - came_s <= self._drop_after_s:
                return item
        raise StopIteration

    def __enter__(self) -> ShardedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iterator. Idempotent; any thread may call it."""
        self._closed.set()


_RUNNING: WeakKeyDictionary[Thread, Event] = WeakKeyDictionary()
"""Threads that draw ahead, which must not receive content while the interpreter exits: that aborts the process."""


@atexit.register
def _end_all() -> None:
    running = dict(_RUNNING)
    for closed in running.values():
        closed.set()
    for thread in running:
        thread.join(JOIN_TIMEOUT_S)


def _fill(draw: Callable[[int], Any], ready: Queue[Any], closed: Event) -> None:
    number = 0
    while not closed.is_set():
        try:
            item = draw(number)
            number += 1
        except DeadlineExceededError as error:
            item = error
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the iterator raises it)
            item = error
            if not getattr(error, "retryable", False):
                _put(ready, closed, item)
                return
        _put(ready, closed, item)


def _put(ready: Queue[Any], closed: Event, item: Any) -> None:
    came_s = time.monotonic()
    while not closed.is_set():
        try:
            ready.put((came_s, item), timeout=POLL_S)
            return
        except Full:
            continue
