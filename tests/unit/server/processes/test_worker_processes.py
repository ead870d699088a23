from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, ClosedError, PeerLostError
from tdserve.base.machine import count_descriptors
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.server.processes.worker_processes import WorkerProcess, WorkerProcesses
from tests.processes import is_gone, open_files, state_of, wait_for
from tests.unit.server.world import Loop

pytestmark = pytest.mark.usefixtures("borrows_nothing")

ARGUMENTS = WorkerArguments(7, transfer_timeout_s=5.0)


async def first_word(process: WorkerProcess) -> bytes:
    """What a worker says when it is ready."""
    process.connection.setblocking(False)
    return await asyncio.get_running_loop().sock_recv(process.connection, 100)


async def ended(process: WorkerProcess, grace_s: float) -> int | None:
    """The exit code of a process whose end this waits for."""
    await process.end(grace_s)
    process.connection.close()
    return await process.reap()


@pytest.fixture
def own(run: Loop) -> Iterator[WorkerProcesses]:
    """A starter of processes for one test, which may kill them."""
    made = WorkerProcesses(timeout_s=1.0)
    yield made
    run(made.stop())
    assert is_gone(made.fork_server_pid)


@pytest.mark.slow
def test_fork_when_called_again_and_again_then_processes_of_their_own(processes: WorkerProcesses, run: Loop) -> None:
    async def scenario() -> None:
        made = await asyncio.gather(*(processes.fork(ARGUMENTS) for _ in range(3)))
        assert len({process.pid for process in made}) == 3
        assert all([await first_word(process) for process in made])
        made[0].connection.close()
        assert await ended(made[0], 30.0) == 0
        os.kill(made[1].pid, signal.SIGABRT)
        assert await ended(made[1], 30.0) == -signal.SIGABRT
        os.kill(made[2].pid, signal.SIGSTOP)
        assert await ended(made[2], 0.0) == -signal.SIGKILL
        await made[2].kill()  # it was reaped; its id may be another process's by now
        assert [state_of(process.pid) for process in made] == [None] * 3

    run(scenario())  # the first one starts the process that forks
    before = count_descriptors()
    run(scenario())
    assert count_descriptors() == before


def test_start_when_called_then_the_fork_server_has_a_session_of_its_own(own: WorkerProcesses) -> None:
    """By which kernels share out processor time."""
    own.start()
    assert os.getsid(own.fork_server_pid) == own.fork_server_pid


@pytest.mark.slow
def test_fork_when_the_root_is_locked_then_the_worker_holds_the_lock_and_the_fork_server_does_not(
    run: Loop, tmp_path: Path
) -> None:
    async def scenario(lock_fd: int) -> None:
        made = WorkerProcesses(lock_fd)
        made.start()
        process = await made.fork(ARGUMENTS)
        assert await first_word(process)
        assert str(tmp_path / "lock") in open_files(process.pid)
        assert str(tmp_path / "lock") not in open_files(made.fork_server_pid)
        process.connection.close()
        assert await ended(process, 30.0) == 0
        await made.stop()

    with (tmp_path / "lock").open("w") as lock:
        run(scenario(lock.fileno()))


@pytest.mark.slow
def test_fork_when_the_fork_server_was_killed_then_its_workers_are_gone_and_another_one_forks(
    own: WorkerProcesses, run: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        made = [await own.fork(ARGUMENTS) for _ in range(2)]
        before = own.fork_server_pid
        os.kill(before, signal.SIGKILL)
        assert [await ended(process, 30.0) for process in made] == [None, None]
        wait_for(lambda: all(is_gone(process.pid) for process in made), "the end of its workers")
        after = await own.fork(ARGUMENTS)
        assert await first_word(after)
        assert own.fork_server_pid != before
        after.connection.close()
        assert await ended(after, 30.0) == 0
        unseen = own.fork_server_pid
        os.kill(unseen, signal.SIGKILL)
        wait_for(lambda: is_gone(unseen), "its end")
        (await own.fork(ARGUMENTS)).connection.close()

    run(scenario())
    assert caplog.text.count("SIGKILL") == 2


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["fork", "kill"])
def test_fork_server_when_it_stands_still_then_killed_and_its_workers_with_it(
    own: WorkerProcesses, run: Loop, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    async def scenario() -> None:
        process = await own.fork(ARGUMENTS)
        before = own.fork_server_pid
        os.kill(before, signal.SIGSTOP)
        if asked == "fork":
            with pytest.raises(PeerLostError, match="another one"):
                await own.fork(ARGUMENTS)
        assert await ended(process, 0.0) is None
        assert is_gone(before)

    run(scenario())
    assert "gave no answer" in caplog.text


def test_fork_when_its_call_was_cancelled_then_the_next_one_gets_its_own_answer(
    processes: WorkerProcesses, run: Loop
) -> None:
    async def scenario() -> None:
        given_up = asyncio.create_task(processes.fork(ARGUMENTS))
        for _ in range(3):
            await asyncio.sleep(0)
        given_up.cancel()
        process = await processes.fork(ARGUMENTS)
        assert await first_word(process)
        os.kill(process.pid, signal.SIGKILL)
        assert await ended(process, 30.0) == -signal.SIGKILL

    run(scenario())


@pytest.mark.slow
def test_fork_when_the_fork_server_has_no_descriptors_left_then_refused_and_later_not(
    own: WorkerProcesses, run: Loop
) -> None:
    async def scenario() -> None:
        assert await ended(await own.fork(ARGUMENTS), 0.0) == -signal.SIGKILL
        limits = resource.prlimit(own.fork_server_pid, resource.RLIMIT_NOFILE)
        resource.prlimit(own.fork_server_pid, resource.RLIMIT_NOFILE, (4, limits[1]))
        with pytest.raises(CapacityError, match="Too many open files"):
            await own.fork(ARGUMENTS)
        resource.prlimit(own.fork_server_pid, resource.RLIMIT_NOFILE, limits)
        assert await ended(await own.fork(ARGUMENTS), 0.0) == -signal.SIGKILL

    run(scenario())


@contextmanager
def no_descriptors() -> Iterator[None]:
    """A block in which this process can open one more file, and no pair of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 1 - count_descriptors())]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)


def test_fork_when_no_descriptors_are_left_then_refused_and_none_is_lost(processes: WorkerProcesses, run: Loop) -> None:
    async def scenario() -> None:
        process = await processes.fork(ARGUMENTS)
        before = count_descriptors()
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            await processes.fork(ARGUMENTS)
        assert count_descriptors() == before
        process.connection.close()
        assert await ended(process, 30.0) == 0

    run(scenario())


def test_close_when_the_fork_server_still_imports_then_does_not_wait_for_it(run: Loop) -> None:
    async def scenario() -> None:
        made = WorkerProcesses()
        made.start()
        forking = asyncio.create_task(made.fork(ARGUMENTS))
        await asyncio.sleep(0)
        made.close()
        with pytest.raises(PeerLostError):
            await forking
        with pytest.raises(ClosedError):
            await made.fork(ARGUMENTS)
        await made.stop()
        assert is_gone(made.fork_server_pid)

    run(scenario())
