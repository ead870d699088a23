"""Tables and queues of a simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdserve.base.errors import WrongStateError
from tdserve.messages.row_numbers import encode_rows
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.v1 import control_pb2
from tests.simulation import content
from tests.simulation.calls import Call
from tests.simulation.models import LONG_S, TIMEOUT_S, StoreModel, read_numbers
from tests.simulation.simulated_client import SimulatedClient
from tests.simulation.virtual_time import clock, pause

MAX_LEASE_S = 1.0
"""Longest limit of a lease."""

LIMITERS = (
    SampleToInsertRatio(ratio=0.5, min_size=1, error_buffer=4.0),
    SampleToInsertRatio(ratio=4.0, min_size=1, error_buffer=8.0),
)
"""Under the first one samples soon wait, under the second one extends do. Each lets a sample of four rows and an extend
of three through in turn."""


class TableModel(StoreModel):
    """A ring. In one that is large no row is overwritten; a small one is written again and again."""

    kind = "table"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.capacity = self.chance.choice([8, 512, 512])
        self.limiter = self.chance.choice(LIMITERS) if self.chance.random() < 0.25 else None
        self.settings = Settings(limiter=self.limiter or MinSize(1))
        self.stored = content.ROW.prepend((self.capacity,))
        self.extends: list[Call[Any]] = []
        self.extend_of: dict[int, Call[Any]] = {}
        self.num_sampled = 0
        self.num_attempted = 0

    async def prepare(self, client: SimulatedClient) -> None:
        await self.insist(client, "create", create_store=content.new_table(self.name, self.capacity, self.settings))

    async def act(self, client: SimulatedClient) -> None:
        choice = self.chance.random()
        if choice < (0.3 if self.limiter is LIMITERS[0] else 0.6):
            await self._extend(client)
        elif choice < 0.8:
            await self._sample(client)
        else:
            await self._read(client)

    def on_begun(self, call: Call[Any]) -> None:
        if isinstance(call.what, tuple):
            self.extends.append(call)
            self.extend_of.update(dict.fromkeys(call.what, call))

    async def _extend(self, client: SimulatedClient) -> None:
        identities = [next(self.identities) for _ in range(self.chance.randint(1, 3))]
        asked = control_pb2.ExtendRequest(
            store=self.name,
            num_rows=len(identities),
            content=content.encode_content(identities, self.stored.fingerprint),
        )
        by_mail = self.chance.random() < 0.7
        if by_mail and self.chance.random() < 0.8:
            asked.wished_claim = 16
        timeout_s = 1.0 if self.limiter is not None else TIMEOUT_S
        extend = await self.make(client, tuple(identities), timeout_s, by_mail=by_mail, extend=asked)
        if extend.outcome == "done":
            self._check_inserts()

    async def _sample(self, client: SimulatedClient) -> None:
        num_rows = self.chance.randint(1, 4)
        asked = control_pb2.SampleRequest(store=self.name, num_rows=num_rows)
        sample = await self.make(client, "sample", 0.5, on_attempt=lambda: self._note_attempt(num_rows), sample=asked)
        if sample.outcome == "done":
            assert sample.done.accepted.num_rows == num_rows
            self.num_sampled += num_rows
            self._check(
                content.decode_rows_of_table(self.stored, sample.done, self.settings.list_added_columns()), sample
            )
            self._check_samples()

    def _note_attempt(self, num_rows: int) -> None:
        self.num_attempted += num_rows

    def _check_samples(self) -> None:
        """Checks that no more was sampled than the rows that may have been inserted allow, in all lives of the server
        together: the count of samples outlives it."""
        if self.limiter is None:
            return
        num_inserted = sum(len(each.what) for each in self.extends if each.outcome != "failed")
        most = (num_inserted - self.limiter.min_size) * self.limiter.ratio + self.limiter.error_buffer
        assert self.num_sampled <= most, f"the limiter let {self.num_sampled} samples through, of {most:g}"

    def _check_inserts(self) -> None:
        """Checks that no more was inserted than the samples that may have been drawn allow.

        Each attempt of a sample may count: the server cannot know that the answer to an earlier one was lost. An empty
        table takes any insert; a small ring may be empty again if extends that had made room fail.
        """
        if self.limiter is None or self.capacity == 8:
            return
        num_inserted = sum(len(each.what) for each in self.extends if each.outcome == "done")
        most = self.limiter.min_size + (self.num_attempted + self.limiter.error_buffer) / self.limiter.ratio
        assert num_inserted <= most, f"the limiter let {num_inserted} inserts through, of {most:g}"

    async def _read(self, client: SimulatedClient, timeout_s: float = TIMEOUT_S) -> bool:
        asked = control_pb2.ReadRequest(store=self.name, selection=content.ALL, fingerprint=self.stored.fingerprint)
        read = await self.make(client, "read", timeout_s, read=asked)
        if read.outcome != "done":
            return False
        found = content.decode_rows_of_table(self.stored, read.done, ())
        self._check(found, read)
        if self.capacity > 8:
            self._check_whole([row.identity for row in found], read, may_wait=client.server.full_share > 0.0)
        return True

    def _check(self, found: list[content.FoundRow], read: Call[Any]) -> None:
        """Checks that rows were written, and are not older than what was acknowledged in their place."""
        for row in found:
            extend = self.extend_of.get(row.identity)
            assert extend is not None, f"row {row} was never written"
            assert extend.outcome != "failed", f"{extend.what} failed ({extend.error}), and can be read"
            if extend.outcome == "done":
                expected = read_numbers(extend.done)[extend.what.index(row.identity)]
                assert row.row == expected, f"row {row} was acknowledged as {expected}"
            newer = [
                each.what
                for each in self.extends
                if extend.is_before(each) and each.is_before(read) and row.row in read_numbers(each.done)
            ]
            assert not newer, f"row {row} is there although {newer} was acknowledged in its place"

    def _check_whole(self, found: list[int], read: Call[Any], *, may_wait: bool) -> None:
        """Checks that all that was acknowledged is there, once, and nothing is half there.

        Args:
            may_wait: Whether rows may wait until not even the reserve of the catalog is full.
        """
        assert len(set(found)) == len(found), f"a row is there twice: {sorted(found)}"
        present = set(found)
        for extend in self.extends:
            num_present = len(present & set(extend.what))
            assert num_present in (0, len(extend.what)), f"{extend.what} is half visible"
            is_missing = not num_present and extend.is_before(read)
            assert may_wait or not is_missing, f"{extend.what} was acknowledged, and is gone"

    async def finish(self, client: SimulatedClient) -> None:
        assert await self._read(client, LONG_S), "the last read failed"
        acknowledged = sum(len(each.what) for each in self.extends if each.outcome == "done")
        possible = acknowledged + sum(len(each.what) for each in self.extends if each.outcome == "unknown")
        asked = control_pb2.SampleRequest(store=self.name, asks_counts=True)
        counts = (await self.insist(client, "counts", sample=asked)).counts
        assert acknowledged <= counts.inserts <= possible, f"{counts.inserts} inserts of {acknowledged}..{possible}"
        assert counts.rows <= self.capacity


@dataclass(frozen=True)
class Holder:
    """Who holds a job.

    Attributes:
        scope: What the lease ends with; None: it has ended.
        until_s: Before this time it does not end by itself.
    """

    client: SimulatedClient
    scope: object
    until_s: float

    @property
    def is_holding(self) -> bool:
        """Whether the lease cannot have ended yet."""
        return self.scope is not None and self.client.lease_scope is self.scope and clock.now_s < self.until_s


@dataclass(frozen=True)
class Taken:
    """Jobs that a client has got.

    Attributes:
        request: The number of the request that took them.
        lease_s: The limit of the lease; 0.0: none.
    """

    rows: list[content.FoundRow]
    request: int
    lease_s: float

    @property
    def jobs(self) -> set[int]:
        """The jobs."""
        return {row.identity for row in self.rows}


class QueueModel(StoreModel):
    """Jobs, each of which is consumed once. Of some queues all leases are limited: then jobs that their clients forget
    come back although the clients stay."""

    kind = "queue"
    max_size = 6
    consumers: tuple[str, ...] = (OWN,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settings = self.make_settings()
        self.stored = content.ROW.prepend((self.max_size,))
        self.extend_of: dict[int, Call[Any]] = {}
        self.holders: dict[tuple[str, int], Holder] = {}
        self.outlasts_clients = self.chance.random() < 0.4
        self.acknowledged: dict[str, set[int]] = {consumer: set() for consumer in self.consumers}
        self.maybe_acknowledged: dict[str, set[int]] = {consumer: set() for consumer in self.consumers}

    def make_settings(self) -> Settings:
        """Returns the settings of the table."""
        return Settings(sampler=Fifo(), limiter=Queue(self.max_size), is_queue=True)

    async def prepare(self, client: SimulatedClient) -> None:
        await self.insist(client, "create", create_store=content.new_table(self.name, self.max_size, self.settings))

    async def act(self, client: SimulatedClient) -> None:
        if self.chance.random() < 0.55:
            jobs = [next(self.identities) for _ in range(self.chance.randint(1, 3))]
            call = self.calls.begin(tuple(jobs))
            self.extend_of.update(dict.fromkeys(jobs, call))
            asked = control_pb2.ExtendRequest(
                store=self.name, num_rows=len(jobs), content=content.encode_content(jobs, self.stored.fingerprint)
            )
            by_mail = self.chance.random() < 0.5
            await self.calls.settle(call, client.call(1.0, by_mail=by_mail, extend=asked))
        else:
            consumer = self.chance.choice(self.consumers)
            is_limited = self.outlasts_clients or self.chance.random() < 0.3
            lease_s = self.chance.uniform(0.01, MAX_LEASE_S) if is_limited else 0.0
            taken = await self._take(client, consumer, self.chance.randint(1, 2), 0.5, lease_s=lease_s)
            if taken.rows and taken.lease_s:
                await self._work(client, consumer, taken)
            elif taken.rows:
                await self._end(client, consumer, taken)

    async def _take(
        self, client: SimulatedClient, consumer: str, num_rows: int, timeout_s: float, *, lease_s: float = 0.0
    ) -> Taken:
        min_rows = self.chance.randint(0, num_rows)
        asked = control_pb2.SampleRequest(
            store=self.name, num_rows=num_rows, min_rows=min_rows, is_lease=True, lease_s=lease_s, consumer=consumer
        )
        attempts_s: list[float] = []
        take = await self.make(
            client, "take", timeout_s, on_attempt=lambda: attempts_s.append(clock.now_s), sample=asked
        )
        if take.outcome != "done":
            client.give_up(client.newest)
            return Taken([], 0, 0.0)
        found = content.decode_rows_of_table(self.stored, take.done, self.settings.list_added_columns())
        assert (min_rows or num_rows) <= len(found) <= num_rows, f"{len(found)} of {min_rows} to {num_rows} jobs"
        until_s = attempts_s[-1] + lease_s if lease_s else math.inf
        is_late = clock.now_s >= until_s  # the lease may have ended before its answer was here: others may have them
        for row in found:
            extend = self.extend_of.get(row.identity)
            assert extend is not None, f"job {row} was never put"
            assert extend.outcome != "failed", f"{extend.what} failed ({extend.error}), and is in the queue"
            is_had = row.identity in self.acknowledged[consumer]
            assert not is_had, f"job {row.identity} was consumed, and comes again"
            holder = self.holders.get((consumer, row.identity))
            is_held = holder is not None and holder.is_holding
            assert is_late or not is_held, f"job {row.identity} is on lease to another client"
        taken = Taken(found, client.newest, lease_s)
        if not is_late:
            self._hold(client, consumer, taken.jobs, until_s)
        return taken

    def _hold(self, client: SimulatedClient, consumer: str, jobs: set[int], until_s: float) -> None:
        holder = Holder(client, client.lease_scope, until_s)
        self.holders.update(dict.fromkeys(((consumer, job) for job in jobs), holder))

    def _let_go(self, client: SimulatedClient, consumer: str, jobs: set[int]) -> None:
        """Notes that a client may not hold jobs any more; others may have got them before."""
        for job in jobs:
            holder = self.holders.get((consumer, job))
            if holder is not None and holder.client is client:
                del self.holders[consumer, job]

    async def _work(self, client: SimulatedClient, consumer: str, taken: Taken) -> None:
        """Keeps jobs of a limited lease for a while, perhaps renews it, and ends it or hangs."""
        for _ in range(self.chance.randint(0, 2)):
            await pause(self.chance.random() ** 2 * MAX_LEASE_S)
            await self._renew(client, consumer, taken)
        await pause(self.chance.random() ** 2 * MAX_LEASE_S)
        if self.chance.random() < 0.7:
            await self._end(client, consumer, taken)

    async def _renew(self, client: SimulatedClient, consumer: str, taken: Taken) -> None:
        leased, lease_s, begun_s = self._name(consumer, taken), self.chance.uniform(0.01, MAX_LEASE_S), clock.now_s
        leased.lease_s = lease_s
        before = [self.holders.get((consumer, job)) for job in taken.jobs]
        is_holding = all(each is not None and each.client is client and each.is_holding for each in before)
        self._let_go(client, consumer, taken.jobs)  # it may end sooner than before
        asked = control_pb2.ChangeRequest(store=self.name, renew=leased)
        renewal = await self.make(client, "renew", by_mail=self.chance.random() < 0.5, change=asked)
        scope = client.lease_scope
        if renewal.outcome == "done" and all(each is None or each.scope is scope for each in before):
            for job in taken.jobs:
                others = self.holders.get((consumer, job))
                assert others is None or not others.is_holding, f"job {job} was renewed, and is another client's"
            self._hold(client, consumer, taken.jobs, begun_s + lease_s)
        self._check_refusal(renewal, before if is_holding else [])

    def _check_refusal(self, call: Call[Any], before: list[Holder | None]) -> None:
        """Checks that a lease that cannot have ended was not refused.

        Args:
            before: Who held the jobs when the call began.
        """
        if call.outcome == "failed" and isinstance(call.error, WrongStateError) and before:
            is_holding = all(each is not None and each.is_holding for each in before)
            assert not is_holding, f"{call.what} was refused although the lease goes on: {call.error}"

    def _name(self, consumer: str, taken: Taken) -> control_pb2.Leased:
        return control_pb2.Leased(
            consumer=consumer,
            rows=encode_rows(np.array([each.row for each in taken.rows], np.int64)),
            generations=np.array([each.generation for each in taken.rows], np.int64).astype("<u4").tobytes(),
            request=taken.request if taken.lease_s or self.chance.random() < 0.5 else 0,
        )

    async def _end(self, client: SimulatedClient, consumer: str, taken: Taken) -> None:
        leased, jobs = self._name(consumer, taken), taken.jobs
        if self.chance.random() < 0.2:
            self._let_go(client, consumer, jobs)
            await self.make(client, "give back", change=control_pb2.ChangeRequest(store=self.name, give_back=leased))
            return
        asked = control_pb2.ChangeRequest(store=self.name, acknowledge=leased)
        before = [self.holders.get((consumer, job)) for job in jobs]
        is_own = all(each is not None and each.client is client for each in before)
        ack = await self.make(client, "acknowledge", by_mail=self.chance.random() < 0.5, change=asked)
        self._check_refusal(ack, before if is_own else [])
        self._let_go(client, consumer, jobs)
        if ack.outcome == "done":
            twice = jobs & self.acknowledged[consumer]
            assert not twice, f"jobs {twice} were consumed twice"
            self.acknowledged[consumer] |= jobs
        if ack.outcome != "failed":  # otherwise they come again, unless somebody else acknowledges them
            self.maybe_acknowledged[consumer] |= jobs

    async def finish(self, client: SimulatedClient) -> None:
        """Takes all that is left: each job that was put and is not consumed for certain is there once."""
        for consumer in self.consumers:
            await self._finish(client, consumer)

    async def _finish(self, client: SimulatedClient, consumer: str) -> None:
        left: list[int] = []
        while True:
            found = await self._take(client, consumer, 1, 0.0)
            if not found.rows:
                break
            left += [row.identity for row in found.rows]
        await self._wait_returned(client, consumer, left)
        assert len(set(left)) == len(left), f"jobs come twice: {left}"
        for job, extend in self.extend_of.items():
            if extend.outcome == "done" and job not in self.maybe_acknowledged[consumer]:
                assert job in left, f"job {job} was put, and is gone"

    async def _wait_returned(self, client: SimulatedClient, consumer: str, left: list[int]) -> None:
        """Takes what comes back from sessions that have just ended, or from leases that soon do."""
        num_empty = 0
        while num_empty < 3:
            found = await self._take(client, consumer, 1, MAX_LEASE_S)
            num_empty += not found.rows
            left += [row.identity for row in found.rows]


class ConsumersModel(QueueModel):
    """Jobs, each of which is consumed once by either consumer, and leaves then."""

    kind = "consumers"
    consumers = ("judge", "trainer")

    def make_settings(self) -> Settings:
        """Returns the settings of the table."""
        return Settings(sampler=Fifo(), limiter=Queue(self.max_size), consumers=self.consumers)

    async def finish(self, client: SimulatedClient) -> None:
        """As for a queue. A job that both have consumed is gone, and any other one is there."""
        await super().finish(client)
        asked = control_pb2.SampleRequest(store=self.name, num_rows=1, asks_counts=True)
        num_rows = (await self.insist(client, "count", sample=asked)).counts.rows
        gone, maybe_gone = (set.intersection(*had.values()) for had in (self.acknowledged, self.maybe_acknowledged))
        put = {job for job, extend in self.extend_of.items() if extend.outcome == "done"}
        maybe_put = {job for job, extend in self.extend_of.items() if extend.outcome != "failed"}
        assert len(put - maybe_gone) <= num_rows <= len(maybe_put - gone), f"there are {num_rows} jobs"
