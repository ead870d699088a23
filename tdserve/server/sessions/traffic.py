"""Reads carried out by workers, the counts of all transfers by transport, and the times of the workers' work."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tdserve.base.call_times import CallTimes
from tdserve.rules.channel_transports import AT_ONCE_TRANSPORT
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import control_pb2, worker_pb2

INLINE = "inline"

COUNT_TIMEOUT_S = 2.0
"""Longest wait for a worker's counts. It answers within a millisecond unless it is stopped or the machine is busy."""


@dataclass
class _Count:
    bytes_in: int = 0
    bytes_out: int = 0
    transfers_in: int = 0
    transfers_out: int = 0
    bytes_relayed: int = 0
    transfers_relayed: int = 0


class Traffic:
    """Runs reads for clients and counts all transfers.

    Args:
        unsent: Counts the memory of answers, and of nothing else.

    Attributes:
        work_times: What the data workers have done, by kind of order or request.
    """

    def __init__(self, unsent: AdmissionBudget) -> None:
        self._unsent = unsent
        self.work_times = CallTimes()
        self._counts: dict[str, _Count] = defaultdict(_Count)

    async def read(
        self,
        session: ClientSession,
        request: int,
        order: worker_pb2.Order,
        accepted: control_pb2.Accepted,
        *,
        announces: bool,
        rest: bytes = b"",
    ) -> control_pb2.Done | None:
        """Has the session's worker send what ``order`` describes.

        Args:
            announces: Whether Accepted is sent together with the order. Otherwise the worker first determines the size
                (non-tensor values, selections): it returns small content, which is sent inline, and Accepted announces
                larger content.
            rest: As in ``DataWorker.submit``.

        Returns:
            The answer with inline content; None when Accepted was sent and the content follows over the channel.

        Raises:
            ServerBusyError: There is no memory for the answer; nothing was sent.
        """
        with self._unsent.admit_answer(session.answers, accepted, takes_values=session.hello.takes_values):
            return await self._read(session, request, order, accepted, announces=announces, rest=rest)

    async def _read(
        self,
        session: ClientSession,
        request: int,
        order: worker_pb2.Order,
        accepted: control_pb2.Accepted,
        *,
        announces: bool,
        rest: bytes,
    ) -> control_pb2.Done | None:
        if announces:
            moving = session.worker.submit(order, rest=rest)
            await session.send_accepted(request, accepted)
            self.count_sent(session.transport, (await moving).nbytes_moved)
            return None
        announcing: list[asyncio.Task[None]] = []

        def announce(prepared: worker_pb2.Prepared) -> None:
            accepted.values, accepted.values_nbytes = prepared.values, prepared.values_nbytes
            announcing.append(asyncio.create_task(session.send_accepted(request, accepted)))

        worked = await session.worker.submit(order, rest=rest, on_prepared=announce)
        for task in announcing:
            await task
        if not worked.HasField("inline"):
            self.count_sent(session.transport, worked.nbytes_moved)
            return None
        return self.make_inline(accepted, worked.inline, worked.values)

    def make_inline(self, accepted: control_pb2.Accepted, content: bytes, values: bytes) -> control_pb2.Done:
        """Makes the answer that has the content in it, and counts it."""
        accepted.values = values
        self.count_sent(INLINE, len(content))
        return control_pb2.Done(inline=content, accepted=accepted)

    def count_sent(self, transport: str, nbytes: int) -> None:
        """Counts a transfer from the server."""
        count = self._counts[transport]
        count.bytes_out += nbytes
        count.transfers_out += 1

    def count_relayed(self, transport: str, nbytes: int) -> None:
        """Counts a transfer from client to client."""
        count = self._counts[transport]
        count.bytes_relayed += nbytes
        count.transfers_relayed += 1

    async def collect_counts(self, workers: Sequence[DataWorker]) -> None:
        """Collects what the workers have counted: the reads that they answered without this process, and the times of
        their work. A late answer is counted when it arrives."""
        orders = [worker.submit(worker_pb2.Order(take_counts=worker_pb2.TakeCounts())) for worker in workers]
        for order in orders:
            order.add_done_callback(self._add_counts)  # late answers too: the worker's counts restart at 0
        if orders:
            await asyncio.wait(orders, timeout=COUNT_TIMEOUT_S)

    def _add_counts(self, order: asyncio.Future[worker_pb2.Worked]) -> None:
        if not order.cancelled() and order.exception() is None:
            found = order.result()
            inline = self._counts[INLINE]
            inline.transfers_out += found.num_reads
            inline.bytes_out += found.nbytes_moved
            if found.num_sent:
                sent = self._counts[AT_ONCE_TRANSPORT]
                sent.transfers_out += found.num_sent
                sent.bytes_out += found.nbytes_sent
            for calls in found.calls:
                errors = {error.code: error.num_calls for error in calls.errors}
                self.work_times.add(calls.call, list(calls.buckets), calls.sum_s, errors)

    def count_received(self, transport: str, content: control_pb2.Content) -> None:
        """Counts a transfer to the server."""
        is_inline = content.HasField("inline")
        count = self._counts[INLINE if is_inline else transport]
        count.bytes_in += len(content.inline) if is_inline else sum(content.message_nbytes)
        count.transfers_in += 1

    def list_stats(self) -> list[control_pb2.TransportStats]:
        """Returns the counts, by transport."""
        return [
            control_pb2.TransportStats(transport=name, **vars(count)) for name, count in sorted(self._counts.items())
        ]
