"""The process that forks data workers dies or stands still: no acknowledged row is lost, and no process is left
behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Writer
from tests.processes import (
    REPOSITORY,
    START_TIMEOUT_S,
    all_below,
    children_of,
    fork_servers_of,
    is_gone,
    state_of,
    stopped,
    wait_for,
    workers_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("borrows_nothing")]

ROW = TensorDict({"number": torch.tensor(0), "large": torch.zeros(20_000)}, [])


def fork_server_of(server_pid: int) -> int:
    """Waits until a server has forked a data worker; returns its fork server."""

    def look() -> int | None:
        return next((found for found in fork_servers_of(server_pid) if children_of(found)), None)

    return wait_for(look, "a data worker", timeout_s=START_TIMEOUT_S)


@pytest.mark.slow
def test_extend_when_the_fork_server_dies_or_stands_still_then_goes_on_and_no_row_is_lost(tmp_path: Path) -> None:
    with (
        tdserve.Server(tmp_path / "root", num_workers=2, worker_timeout_s=3.0) as server,
        server.client(transport="gloo", timeout_s=60.0) as client,
    ):
        replay = client.create_replay("replay", like=ROW, capacity=20_000)

        def write(value: int) -> None:
            replay.extend(TensorDict({"number": torch.tensor([value]), "large": torch.ones(1, 20_000)}, [1]))

        writer = Writer(write)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            writer.goes_on()
            before = fork_server_of(server.pid)
            os.kill(before, number)
            for worker in workers_of(server.pid):  # has it asked for the next one
                os.kill(worker, signal.SIGKILL)
            wait_for(lambda pid=before: is_gone(pid), "its end")  # type: ignore[misc]
            writer.goes_on()
        acknowledged = writer.end()
        stored = replay[: len(replay)]
        assert sorted(stored["number"].tolist()) == acknowledged
        assert bool((stored["large"] == 1).all())
        processes = all_below(server.pid)
    assert all(map(is_gone, processes))


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "one_port"), [("gloo", False), ("grpc", True)])
def test_clients_when_no_data_worker_has_started_then_local_ones_work_and_others_wait_for_it(
    tmp_path: Path, transport: str, one_port: bool
) -> None:
    with tdserve.Server(tmp_path / "root", one_port=one_port) as server:
        (fork_server,) = fork_servers_of(server.pid)
        copied = tmp_path / "copied"  # this client is on the same machine, but does not see the root
        copied.mkdir()
        with stopped(fork_server), ThreadPoolExecutor(1) as thread, server.client(transport="shm") as client:
            table = client.create_replay("table", ROW, 100)
            table.extend(ROW.expand(8).clone())
            assert table.sample(4).batch_size == (4,)
            queue = client.create_queue("queue", ROW, 100)
            queue.extend(ROW.expand(8).clone())
            queue.ack(queue.take(4, ack=False))
            client.publish("weights", ROW)
            assert not workers_of(server.pid)

            def sample() -> int:
                with server.client(root=str(copied), timeout_s=START_TIMEOUT_S) as other:
                    assert other.stats()["transport"] == transport
                    return len(other.replay("table").sample(4))

            sampled = thread.submit(sample)
            wait_for(lambda: len(client.stats()["sessions"]) == 2, "the session of the other client")
            assert not sampled.done()
            os.kill(fork_server, signal.SIGCONT)
            assert sampled.result(START_TIMEOUT_S) == 4


@pytest.mark.slow
def test_extends_when_they_are_early_and_no_data_worker_has_started_then_in_their_order(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server:
        (fork_server,) = fork_servers_of(server.pid)
        with server.client(transport="shm", timeout_s=START_TIMEOUT_S) as client:
            texts = client.create_replay("texts", TensorDict({"text": "how"}), 2)
            with stopped(fork_server):
                futures = [texts.extend(TensorDict({"text": [text]}, [1]), return_early=True) for text in "abcd"]
            numbers = [int(future.result(START_TIMEOUT_S)) for future in futures]
            assert numbers == [0, 1, 0, 1]
            assert texts[:]["text"] == ["c", "d"]


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_lease_when_other_calls_find_no_data_worker_then_it_lasts_and_the_rows_are_acknowledged(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server:
        (fork_server,) = fork_servers_of(server.pid)
        with server.client(transport="shm", timeout_s=START_TIMEOUT_S) as client:
            queue = client.create_queue("queue", ROW, 100)
            queue.extend(ROW.expand(8).clone())
            texts = client.create_replay("texts", TensorDict({"text": "how"}), 100)
            for number in range(2):  # the worker has not started; it is started again
                with stopped(fork_server):
                    for worker in workers_of(server.pid):
                        os.kill(worker, signal.SIGKILL)
                    rows = queue.take(4, ack=False)
                    with pytest.raises(tdserve.DeadlineExceededError, match="data worker 0"):
                        texts.extend(TensorDict({"text": ["this", "that"]}, [2]), timeout_s=0.1)
                queue.ack(rows)
                texts.extend(TensorDict({"text": [f"that {number}"]}, [1]))
            assert sorted(texts[:]["text"]) == ["that 0", "that 1"]  # a later row may fill the hole of a failed write


@pytest.mark.full
def test_fork_server_when_killed_under_process_one_then_no_zombie_is_left(tmp_path: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "tdserve", "serve"]
    process = subprocess.Popen([*command, str(tmp_path), "--port", "0"], cwd=REPOSITORY, stdout=subprocess.PIPE)
    with process, ExitStack() as stack:
        stack.callback(process.kill)  # and all below it
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"tdserve ready at ")
        (first,) = children_of(process.pid)
        orphans = []
        for _ in range(2):
            before = fork_server_of(first)
            orphans += [before, *workers_of(first)]
            os.kill(before, signal.SIGKILL)
            wait_for(lambda pid=before: fork_server_of(first) != pid, "another one")  # type: ignore[misc]
        wait_for(lambda: not any(map(state_of, orphans)), "that the dead ones are reaped")
        os.kill(first, signal.SIGTERM)
        assert process.wait(30.0) == 0
