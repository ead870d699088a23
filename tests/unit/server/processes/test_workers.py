from __future__ import annotations

import asyncio
import os
import signal
from itertools import accumulate

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import LocalProtocolError, PeerLostError
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.server.processes import workers
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import MAX_DEATHS, DataWorker, compute_backoff_s
from tdserve.structure.trees.tree import Node, Spec
from tdserve.v1 import worker_pb2
from tests.unit.server.world import Loop, World


def discarding() -> worker_pb2.Order:
    """Returns an order that does not end, since the channel that it needs never opens."""
    return worker_pb2.Order(session=77, discard=worker_pb2.Discard(message_nbytes=[8]))


def test_order_when_it_fails_then_the_future_has_the_workers_error(worker: DataWorker, run: Loop) -> None:
    async def scenario() -> None:
        await worker.ready.wait()
        order = worker_pb2.Order()
        order.send_rows.store.fingerprint = b"never told"
        with pytest.raises(LocalProtocolError, match="has not received"):
            await worker.submit(order)

    run(scenario())


def test_worker_when_killed_then_orders_fail_it_is_reported_and_another_comes(
    worker: DataWorker, lost_workers: list[DataWorker], run: Loop
) -> None:
    async def scenario() -> tuple[int, int]:
        await worker.ready.wait()
        before = worker.pid
        assert worker.known_specs.must_include(Spec(Node((), None, None, None, ())))
        pending = worker.submit(discarding())
        os.kill(before, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="data worker 0"):
            await pending
        assert len(worker.known_specs) == 0
        with pytest.raises(PeerLostError, match="restarted"):
            await worker.submit(discarding())
        worker.send(discarding())  # a report that nobody awaits is ignored
        await worker.ready.wait()
        return before, worker.pid

    num_restarts, num_lost = worker.num_restarts, len(lost_workers)
    before, after = run(scenario())
    assert before != after
    assert lost_workers[num_lost:] == [worker]
    assert worker.num_restarts == num_restarts + 1


def test_rest_when_a_worker_dies_again_and_again_then_longer_each_time_until_one_lives_long() -> None:
    rests_s = list(accumulate([0.1] * 20, compute_backoff_s, initial=0.1))
    assert rests_s[:4] == [0.1, 0.2, 0.4, 0.8]
    assert rests_s[-1] == workers.MAX_RESTART_BACKOFF_S
    assert compute_backoff_s(rests_s[-1], workers.HEALTHY_AFTER_S + 1.0) == workers.RESTART_BACKOFF_S


def test_worker_when_it_stands_still_then_killed_and_orders_fail_and_another_comes(
    worker: DataWorker, run: Loop
) -> None:
    async def scenario() -> tuple[int, int]:
        await worker.ready.wait()
        before = worker.pid
        await worker.submit(worker_pb2.Order(take_counts=worker_pb2.TakeCounts()))
        pending = worker.submit(discarding())
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(PeerLostError, match="data worker 0"):
            await asyncio.wait_for(pending, 30.0)
        await worker.ready.wait()
        return before, worker.pid

    before, after = run(scenario())
    assert before != after
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_order_when_the_worker_has_never_started_then_the_error_names_its_start(
    run: Loop, processes: WorkerProcesses
) -> None:
    async def scenario() -> None:
        made = DataWorker(WorkerArguments(7), processes, on_session=lambda report: None, on_lost=lambda worker: None)
        with pytest.raises(PeerLostError, match="data worker 7: it is starting"):
            await made.submit(discarding())

    run(scenario())


def test_stop_when_it_is_still_starting_then_reaped(run: Loop, processes: WorkerProcesses) -> None:
    async def stopped_after(num_turns: int) -> int:
        made = DataWorker(WorkerArguments(5), processes, on_session=lambda report: None, on_lost=lambda worker: None)
        made.start()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(made.stop(), 60.0)
        return made.pid

    async def scenario() -> list[int]:
        return await asyncio.gather(*map(stopped_after, (0, 1, 2, 5)))

    for pid in filter(None, run(scenario())):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_order_when_it_must_be_done_and_the_worker_dies_of_it_then_repeated_alone_and_not_without_end(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, sent, together = set[int](), [0, 0], list[int]()

    def submit(order: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
        number, loop = int(order.read_columns.compares), asyncio.get_running_loop()
        under_way.add(number)
        sent[number] += 1
        together.append(len(under_way))
        reported = loop.create_future()

        def report() -> None:
            under_way.discard(number)
            if number or sent[number] == 1:  # the first one was only beside it
                reported.set_exception(PeerLostError(peer="data worker 0", reason="it died"))
            else:
                reported.set_result(worker_pb2.Worked())

        loop.call_later(0.001, report)
        return reported

    async def scenario() -> list[BaseException | None]:
        store = await world.create("x", TensorDict({"a": torch.zeros(1)}, [1]))
        orders = [
            worker_pb2.Order(read_columns=worker_pb2.ReadColumns(compares=is_culprit)) for is_culprit in (False, True)
        ]
        monkeypatch.setattr(world.worker, "submit", submit)
        doing = (world.worker.order_until_done(store, order) for order in orders)
        return await asyncio.wait_for(asyncio.gather(*doing, return_exceptions=True), 20.0)

    innocent, culprit = run(scenario())
    assert innocent is None
    assert isinstance(culprit, PeerLostError)
    assert sent == [2, MAX_DEATHS]
    assert together == [1, 2] + [1] * MAX_DEATHS


def test_order_when_it_must_be_done_and_others_kill_the_worker_again_and_again_then_it_is_done_in_the_end(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_RESTART_BACKOFF_S", 0.01)
    submit, killed = world.worker.submit, list[int]()

    def kill_and_submit(order: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
        if len(killed) > MAX_DEATHS:
            return submit(order)
        killed.append(world.worker.pid)
        os.kill(killed[-1], signal.SIGSTOP)  # so that it does not carry the order out first
        reported = submit(order)
        os.kill(killed[-1], signal.SIGKILL)
        return reported

    async def scenario() -> None:
        store = await world.create("x", TensorDict({"a": torch.zeros(1)}, [1]))
        monkeypatch.setattr(world.worker, "submit", kill_and_submit)
        order = worker_pb2.Order(read_columns=worker_pb2.ReadColumns())
        await asyncio.wait_for(world.worker.order_until_done(store, order), 60.0)

    run(scenario())
    assert len(set(killed)) == MAX_DEATHS + 1
