from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.call_times import NUM_BUCKETS
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.messages.content import read_layout
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions import traffic as traffic_module
from tdserve.server.sessions.traffic import Traffic
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.world import INLINE_BYTES, Loop, World, columns_of, outbox


def test_stats_when_content_moves_then_counted_by_transport_and_direction() -> None:
    traffic = Traffic(AdmissionBudget(1 << 30))
    traffic.count_received("gloo", control_pb2.Content(message_nbytes=[100, 20]))
    traffic.count_received("gloo", control_pb2.Content(inline=bytes(7)))
    traffic.count_sent("gloo", 5)
    gloo, inline = traffic.list_stats()
    assert (gloo.transport, gloo.bytes_in, gloo.transfers_in) == ("gloo", 120, 1)
    assert (gloo.bytes_out, gloo.transfers_out) == (5, 1)
    assert (inline.transport, inline.bytes_in, inline.transfers_in, inline.bytes_out) == ("inline", 7, 1, 0)


def test_collect_counts_when_a_worker_is_not_there_then_left_out(world: World, run: Loop) -> None:
    traffic = Traffic(AdmissionBudget(1 << 30))

    async def scenario() -> None:
        absent = DataWorker(
            WorkerArguments(1), WorkerProcesses(), on_session=lambda report: None, on_lost=lambda worker: None
        )
        await traffic.collect_counts([])
        await traffic.collect_counts([absent, world.worker])

    run(scenario())
    (inline,) = traffic.list_stats()
    assert (inline.transfers_out, inline.bytes_out) == (0, 0)


class Slow(DataWorker):
    """A worker that answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__(
            WorkerArguments(1), WorkerProcesses(), on_session=lambda report: None, on_lost=lambda worker: None
        )
        self.answer: asyncio.Future[worker_pb2.Worked] = asyncio.get_running_loop().create_future()

    def submit(self, *_: Any, **__: Any) -> asyncio.Future[worker_pb2.Worked]:
        return self.answer


def test_collect_counts_when_a_worker_answers_late_then_counted_then(
    run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_module, "COUNT_TIMEOUT_S", 0.0)
    traffic = Traffic(AdmissionBudget(1 << 30))

    async def scenario() -> None:
        worker = Slow()
        await traffic.collect_counts([worker])
        assert traffic.list_stats() == []
        calls = control_pb2.CallFigures(call="send_rows", buckets=[2, *[0] * (NUM_BUCKETS - 1)], sum_s=0.25)
        calls.errors.add(code="ABORTED", num_calls=1)
        worker.answer.set_result(worker_pb2.Worked(num_reads=3, nbytes_moved=40, calls=[calls]))
        await asyncio.sleep(0)

    run(scenario())
    (inline,) = traffic.list_stats()
    assert (inline.transport, inline.transfers_out, inline.bytes_out) == ("inline", 3, 40)
    (work,) = traffic.work_times
    assert (work.call, work.buckets[0], work.sum_s, work.errors) == ("send_rows", 2, 0.25, {"ABORTED": 1})


def test_read_when_content_is_small_then_in_the_answer_and_counted(world: World, run: Loop) -> None:
    store = run(world.create("x", TensorDict({"a": torch.zeros(4)}, [4])))
    session = world.session()
    order = session.make_order(1)
    order.send_selection.store.CopyFrom(store.make_ref(world.worker.known_specs))
    order.send_selection.inline_bytes = INLINE_BYTES
    accepted = control_pb2.Accepted(version=7)
    done = run(world.traffic.read(session, 1, order, accepted, announces=False))
    assert done is not None
    assert outbox(session).messages == []
    assert (done.accepted.version, columns_of(read_layout(store.spec), done.inline)["a"].tolist()) == (7, [0.0] * 4)
    (inline,) = world.traffic.list_stats()
    assert (inline.transport, inline.bytes_out, inline.transfers_out) == ("inline", len(done.inline), 1)
