"""Tables and queues of a simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.messages.row_numbers import encode_rows
from tdserve.rules.replay.conditions import OWN
from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.v1 import control_pb2
from tests.simulation import content
from tests.simulation.calls import Call
from tests.simulation.models import LONG_S, TIMEOUT_S, StoreModel, read_numbers
from tests.simulation.simulated_client import SimulatedClient

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


class QueueModel(StoreModel):
    """Jobs, each of which is consumed once."""

    kind = "queue"
    max_size = 6
    consumers: tuple[str, ...] = (OWN,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settings = self.make_settings()
        self.stored = content.ROW.prepend((self.max_size,))
        self.extend_of: dict[int, Call[Any]] = {}
        self.holders: dict[tuple[str, int], tuple[SimulatedClient, object]] = {}
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
            taken = await self._take(client, consumer, self.chance.randint(1, 2), 0.5)
            if taken:
                await self._end(client, consumer, taken)

    async def _take(
        self, client: SimulatedClient, consumer: str, num_rows: int, timeout_s: float
    ) -> list[content.FoundRow]:
        min_rows = self.chance.randint(0, num_rows)
        asked = control_pb2.SampleRequest(
            store=self.name, num_rows=num_rows, min_rows=min_rows, is_lease=True, consumer=consumer
        )
        take = await self.make(client, "take", timeout_s, sample=asked)
        if take.outcome != "done":
            client.give_up(client.newest)
            return []
        found = content.decode_rows_of_table(self.stored, take.done, self.settings.list_added_columns())
        assert (min_rows or num_rows) <= len(found) <= num_rows, f"{len(found)} of {min_rows} to {num_rows} jobs"
        for row in found:
            extend = self.extend_of.get(row.identity)
            assert extend is not None, f"job {row} was never put"
            assert extend.outcome != "failed", f"{extend.what} failed ({extend.error}), and is in the queue"
            is_had = row.identity in self.acknowledged[consumer]
            assert not is_had, f"job {row.identity} was consumed, and comes again"
            holder = self.holders.get((consumer, row.identity))
            is_held = holder is not None and holder[1] is not None and holder[0].lease_scope is holder[1]
            assert not is_held, f"job {row.identity} is on lease to another client"
            self.holders[consumer, row.identity] = client, client.lease_scope
        return found

    async def _end(self, client: SimulatedClient, consumer: str, taken: list[content.FoundRow]) -> None:
        leased = control_pb2.Leased(
            consumer=consumer,
            rows=encode_rows(np.array([each.row for each in taken], np.int64)),
            generations=np.array([each.generation for each in taken], np.int64).astype("<u4").tobytes(),
        )
        jobs = {row.identity for row in taken}
        if self.chance.random() < 0.2:
            for job in jobs:
                self.holders.pop((consumer, job))
            await self.make(client, "give back", change=control_pb2.ChangeRequest(store=self.name, give_back=leased))
            return
        asked = control_pb2.ChangeRequest(store=self.name, acknowledge=leased)
        ack = await self.make(client, "acknowledge", by_mail=self.chance.random() < 0.5, change=asked)
        for job in jobs:
            self.holders.pop((consumer, job), None)
        if ack.outcome == "done":
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
            if not found:
                break
            left += [row.identity for row in found]
        await self._wait_returned(client, consumer, left)
        assert len(set(left)) == len(left), f"jobs come twice: {left}"
        for job, extend in self.extend_of.items():
            if extend.outcome == "done" and job not in self.maybe_acknowledged[consumer]:
                assert job in left, f"job {job} was put, and is gone"

    async def _wait_returned(self, client: SimulatedClient, consumer: str, left: list[int]) -> None:
        """Takes what comes back from sessions that have just ended."""
        for _ in range(3):
            left += [row.identity for row in await self._take(client, consumer, 1, 1.0)]


class ConsumersModel(QueueModel):
    """Jobs, each of which is consumed once by either consumer, and leaves then."""

    kind = "consumers"
    consumers = ("judge", "trainer")

    def make_settings(self) -> Settings:
        """Returns the settings of the table."""
        return Settings(sampler=Fifo(), limiter=Queue(self.max_size), consumers=self.consumers)

    async def finish(self, client: SimulatedClient) -> None:
        """As of a queue. A job that both have consumed is gone, and any other one is there."""
        await super().finish(client)
        asked = control_pb2.SampleRequest(store=self.name, num_rows=1, asks_counts=True)
        num_rows = (await self.insist(client, "count", sample=asked)).counts.rows
        gone, maybe_gone = (set.intersection(*had.values()) for had in (self.acknowledged, self.maybe_acknowledged))
        put = {job for job, extend in self.extend_of.items() if extend.outcome == "done"}
        maybe_put = {job for job, extend in self.extend_of.items() if extend.outcome != "failed"}
        assert len(put - maybe_gone) <= num_rows <= len(maybe_put - gone), f"there are {num_rows} jobs"
