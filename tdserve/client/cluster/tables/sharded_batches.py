"""Rows on lease from several shards, and iterators over batches of them."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import BoundedSemaphore
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    EndOfStreamError,
    StoreNotFoundError,
    TDServeError,
    WrongStateError,
)
from tdserve.client.cluster.tables.drawn_parts import DrawnPart
from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.step_counts import StepCount
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.tables.draws.batches_ahead import POLL_S, BatchesAhead, make_late_error, take_prefetched
from tdserve.client.tables.draws.draw_arguments import Ahead
from tdserve.client.tables.draws.share import Share
from tdserve.client.tables.draws.taking import (
    Lease,
    LeaseBlock,
    acknowledge,
    choose_lease_s,
    describe_taken,
    give_back_later,
    name_rows,
    renew,
)
from tdserve.client.tables.row_arguments import to_row_numbers
from tdserve.rules.replay.eligibility.leases import RENEWING


@leave_modes_in_calls
class ShardedTaken(LeaseBlock):
    """Rows on lease, as a context manager: acknowledged at a clean exit, given back if the block raises; see
    ``tdserve.Taken``. The rows of each shard are acknowledged together."""

    def __init__(self, table: ShardedTable, draws: ShardDraws, drawn: list[DrawnPart]) -> None:
        self._table, self._draws = table, draws
        self._held = [(part, name_rows(part.rows)) for part in drawn]
        super().__init__(table.name, drawn[0].query, partial(_give_back_later, self._held))
        try:
            self._rows = draws.join(drawn).build()
        except TDServeError:
            self.give_back()
            raise

    def __repr__(self) -> str:
        num_rows = sum(len(to_row_numbers(lease.rows)) for _, lease in self._held)
        return describe_taken(self, num_rows, self._name)

    @property
    def _content(self) -> Any:
        return self._rows

    @property
    def _is_over(self) -> bool:
        return not self._held

    def ack(self, *, timeout_s: float | None = None) -> None:
        """Acknowledges the rows of each shard, at the same time; called again after an error, those that were not.

        Args:
            timeout_s: None is the client's default.

        Raises:
            WrongStateError: This client does not hold those of one. The others were acknowledged.
        """
        self._unseen.detach()
        deadline, held = self._table.make_deadline(timeout_s), self._held
        done: set[int] = set()

        def act(number: int) -> None:
            part, lease = held[number]
            acknowledge(part.client, part.query, lease, deadline)
            done.add(number)

        try:
            self._act_on_each(held, act, deadline, "acknowledged")
        finally:
            self._held = [each for number, each in enumerate(held) if number not in done]

    def renew(self, lease_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Renews the lease of the rows of each shard, at the same time; arguments as in ``tdserve.Taken``.

        Raises:
            WrongStateError: This client does not hold those of one any more. The others were renewed.
        """
        seconds, deadline, held = choose_lease_s(self._query, lease_s), self._table.make_deadline(timeout_s), self._held
        if not held:
            raise WrongStateError(state="the rows were acknowledged or given back", event=RENEWING)

        def act(number: int) -> None:
            part, lease = held[number]
            renew(part.client, part.query, lease, seconds, deadline)

        self._act_on_each(held, act, deadline, "renewed")

    def _act_on_each(
        self, held: Sequence[tuple[DrawnPart, Lease]], act: Callable[[int], None], deadline: Deadline, done: str
    ) -> None:
        """Calls ``act`` with the number of each part, those of different shards at the same time.

        Args:
            done: What has been done to the rows of the others, for the error if one shard fails.
        """
        where: defaultdict[int, list[int]] = defaultdict(list)
        for number, (part, _) in enumerate(held):
            where[part.shard].append(number)

        def act_on_shard(shard: int, _: Any) -> None:
            for number in where[shard]:
                act(number)

        def explain_done(shards: list[int]) -> str:
            counts = {shard: sum(len(to_row_numbers(held[n][1].rows)) for n in each) for shard, each in where.items()}
            return self._table.explain_done(done, counts, shards)

        self._table.ask_each(where, act_on_shard, deadline=deadline, explain_done=explain_done)

    def give_back(self) -> None:
        """Gives the rows back to others."""
        self._unseen.detach()
        drawn, leases = [part for part, _ in self._held], [lease for _, lease in self._held]
        self._draws.give_back(drawn, self._table.make_deadline(None), leases)
        self._held = []

    def give_back_later(self) -> None:
        """Gives the rows back without waiting for that."""
        self._unseen.detach()
        _give_back_later(self._held)


def _give_back_later(held: list[tuple[DrawnPart, Lease]]) -> None:
    for part, lease in held:
        give_back_later(part.client, part.query, lease)


@leave_modes_in_calls
class ShardedBatches:
    """An iterator over samples that a thread draws ahead; a context manager. It ends as ``Batches`` does, and ``next``
    raises what that of ``Batches`` raises.

    Args:
        draw: Draws the batch of a number, from 0; returns its share, None if it is not for a rank, and the batch.
        name: Name of the table, for errors.
        ahead: What is drawn ahead.
        timeout_s: Seconds that one batch may take.
        step_count: Counts the steps that the caller has had; None: batches are no shares.
    """

    def __init__(
        self,
        draw: Callable[[int], tuple[Share | None, Any]],
        name: str,
        *,
        ahead: Ahead,
        timeout_s: float,
        step_count: StepCount | None,
    ) -> None:
        self._name, self._drop_after_s, self._timeout_s = name, ahead.drop_after_s, timeout_s
        self._step_count = step_count
        self._ahead = batches = BatchesAhead(name, max_batches=ahead.num_batches)
        self._room = room = BoundedSemaphore(ahead.num_batches)
        self._on_dropped = weakref.finalize(self, run_from_finalizer, batches.closed.set)
        self._on_dropped.atexit = False  # the thread ends itself then
        batches.start(partial(_fill, draw, batches, room), batches.closed.set)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began_s = time.monotonic()
        while True:
            try:
                came_s, share, batch = self._ahead.take(began_s)
            except EndOfStreamError:
                raise StopIteration from None
            self._room.release()
            if not take_prefetched(self._step_count, share):
                continue
            if time.monotonic() - came_s <= self._drop_after_s:
                return batch
            if time.monotonic() - began_s > self._timeout_s:
                raise make_late_error(self._name, self._timeout_s)

    def __enter__(self) -> ShardedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iterator. Idempotent; any thread may call it."""
        self._on_dropped.detach()
        self._ahead.closed.set()


def _fill(draw: Callable[[int], tuple[Share | None, Any]], ahead: BatchesAhead, room: BoundedSemaphore) -> None:
    """Draws batches while there is room for one that is under way or waits."""
    number = 0
    while not ahead.closed.is_set():
        if not room.acquire(timeout=POLL_S):
            continue
        try:
            share, batch = draw(number)
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the iterator raises it)
            room.release()
            # A table that was deleted may be made anew under its name.
            passes = isinstance(error, (DeadlineExceededError, StoreNotFoundError))
            if not passes and not getattr(error, "retryable", False):
                ahead.put(error)
                return
            ahead.put_passing(error)
        else:
            number += 1
            ahead.put((time.monotonic(), share, batch))
