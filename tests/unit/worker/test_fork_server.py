"""The process that forks data workers, with the test as its control process."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tdserve.base.config import build_single_threaded_environment
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.framing import FrameReader
from tdserve.v1 import worker_pb2
from tdserve.worker.fork_server import ForkServer
from tests.processes import is_gone, open_files, state_of, wait_for

pytestmark = pytest.mark.usefixtures("borrows_nothing")

TIMEOUT_S = 60.0
"""For an import of torch beside others."""

WATCHED_IMPORT = """
import ctypes, gc, json, os, sys

def watch(event, arguments):
    if event == "import" and arguments[0] == "torch":
        found = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
        print(json.dumps({"signal": found.value, "collects": gc.isenabled()}), flush=True)
        os._exit(0)

sys.addaudithook(watch)
from tdserve.worker.fork_server import main
main(["0"])
"""
"""Prints what a fork server has done of its process when it begins to import torch."""

ARGUMENTS = WorkerArguments(0, transfer_timeout_s=5.0).to_json()


class Control:
    """Starts one, asks, and ends it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        command = [sys.executable, "-m", "tdserve.worker.fork_server", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=build_single_threaded_environment()
            )
        assert json.loads(self.socket.recv(100)) == {}

    def ask(self, fds: Sequence[int] = (), **request: object) -> dict[str, int]:
        socket.send_fds(self.socket, [json.dumps({"number": 7, **request}).encode()], fds)
        answer: dict[str, int] = json.loads(self.socket.recv(1000))
        assert answer.pop("number") == 7
        return answer

    def reap(self, pid: int) -> int:
        """The exit code of a worker that is gone, or will be in a moment; 0 for one that was reaped before."""

        def look() -> dict[str, int] | None:
            answer = self.ask(reap=True, pid=pid)
            return None if "ends" in answer else {"exit_code": 0, **answer}

        return wait_for(look, f"the end of process {pid}")["exit_code"]

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


class Worker:
    """A forked process, with control's end of its connection."""

    def __init__(self, control: Control, *fds: int) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        self.handover, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.life_fd, held_fd = os.pipe()
        with theirs, taken:
            sent = [theirs.fileno(), taken.fileno(), held_fd, *fds]
            self.pid = control.ask(sent, fork=ARGUMENTS, num_fds=len(sent))["pid"]
        os.close(held_fd)

    def wait_ready(self) -> None:
        (report,) = FrameReader().feed(self.socket.recv(1 << 16))
        assert worker_pb2.Report.FromString(report).HasField("done")

    def wait_gone(self) -> None:
        gone = select.poll()  # unlike select(), for any number of open descriptors
        gone.register(self.life_fd, select.POLLIN)
        assert gone.poll(1000 * TIMEOUT_S)
        assert os.read(self.life_fd, 1) == b""

    def end(self) -> None:
        self.socket.close()
        self.handover.close()
        os.close(self.life_fd)


@pytest.fixture(scope="module")
def control() -> Iterator[Control]:
    made = Control()
    yield made
    made.end()


@pytest.fixture
def worker(control: Control) -> Iterator[Worker]:
    """A worker that is ready, and is ended after the test."""
    made = Worker(control)
    made.wait_ready()
    yield made
    control.ask(kill=True, pid=made.pid)
    control.reap(made.pid)
    made.end()


@pytest.mark.slow
def test_worker_when_control_closes_its_socket_then_it_leaves_and_is_reaped(control: Control, worker: Worker) -> None:
    worker.socket.close()
    worker.wait_gone()
    assert control.reap(worker.pid) == 0
    assert state_of(worker.pid) is None


def test_worker_when_it_is_killed_then_its_exit_code_has_the_signal_and_its_id_is_forgotten(
    control: Control, worker: Worker
) -> None:
    assert control.ask(kill=True, pid=worker.pid) == {}
    worker.wait_gone()
    assert control.reap(worker.pid) == -signal.SIGKILL
    for pid in (worker.pid, os.getpid()):  # it has not forked this process
        assert control.ask(kill=True, pid=pid) == {}
        assert control.ask(reap=True, pid=pid) == {}


def test_fork_server_when_it_has_forked_then_it_keeps_nothing_of_the_worker_and_has_one_thread(
    control: Control, tmp_path: Path
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        workers = [Worker(control, lock.fileno()) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    server = control.process.pid
    assert os.listdir(f"/proc/{server}/task") == [str(server)]
    files = [open_files(pid) for pid in (server, *(worker.pid for worker in workers))]
    assert [file for file in files[0] if file.startswith(("pipe:", str(tmp_path)))] == _pipes_of_this_test()
    sockets = [{file for file in each if file.startswith("socket:")} for each in files]
    assert len(sockets[0]) == 1
    assert not sockets[0] & sockets[1] | sockets[0] & sockets[2] | sockets[1] & sockets[2]
    assert [each.count(str(tmp_path / "lock")) for each in files] == [0, 1, 1]
    for worker in workers:
        worker.socket.close()
        worker.wait_gone()
        assert control.reap(worker.pid) == 0
        worker.end()


def _pipes_of_this_test() -> list[str]:
    """Returns the pipes of its output, which every process that it starts inherits."""
    return [file for file in map(os.readlink, ("/proc/self/fd/1", "/proc/self/fd/2")) if file.startswith("pipe:")]


def test_fork_when_descriptors_did_not_arrive_then_refused(control: Control) -> None:
    assert control.ask(fork=ARGUMENTS, num_fds=2) == {"errno": errno.EMFILE}


def test_fork_when_the_system_refuses_then_answers_the_errno_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(os, "fork", refuse)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for number in (1, 2):
        ours.send(json.dumps({"number": number, "fork": ARGUMENTS, "num_fds": 0}).encode())
    ours.shutdown(socket.SHUT_WR)
    with ours, theirs:
        ForkServer(theirs, work=lambda fd, sockets_fd, arguments: None).run()
        answers = [json.loads(ours.recv(1000)) for _ in range(3)]
    assert answers == [{}, *({"number": number, "errno": errno.EAGAIN} for number in (1, 2))]


def test_program_when_it_imports_then_it_already_ends_with_its_parent_and_collects_nothing() -> None:
    """Without a collector the imports take a tenth less, and remote clients wait for them after each restart."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"signal": signal.SIGKILL, "collects": False}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["its control goes", "it is killed"])
def test_workers_when_their_fork_server_goes_then_they_go_too_stopped_or_not(end: str) -> None:
    control = Control()
    workers = [Worker(control), Worker(control)]
    os.kill(workers[0].pid, signal.SIGSTOP)
    wait_for(lambda: state_of(workers[0].pid) == "T", "a stop")
    if end == "it is killed":
        control.process.kill()
    else:
        control.socket.close()
    assert control.process.wait(TIMEOUT_S) == (-signal.SIGKILL if end == "it is killed" else 0)
    for worker in workers:
        worker.wait_gone()
        wait_for(lambda pid=worker.pid: is_gone(pid), "the end of a worker")  # type: ignore[misc]
        worker.end()
    control.end()


def test_program_when_control_goes_before_it_has_read_anything_then_ends_in_silence() -> None:
    """A server that could not start said so below the first line of a traceback."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tdserve.worker.fork_server", str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as process:
        theirs.close()
        assert select.select([ours], [], [], TIMEOUT_S)[0]  # it is ready
        ours.close()
        assert process.communicate(timeout=TIMEOUT_S)[1] == ""
    assert process.returncode == 0
