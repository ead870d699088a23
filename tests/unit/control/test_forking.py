from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event

import pytest

from tdserve.base.errors import DeadlineExceededError, TDServeError
from tdserve.control import forking
from tdserve.control.connection import ControlConnection
from tdserve.control.forking import (
    exclude_forks,
    get_fork_gate,
    receive_beside_forks,
    send_beside_forks,
    wait_for_answer,
    watch_forks,
)
from tests.processes import REPOSITORY, wait_for
from tests.unit.control.serving import Answering, serving

TIMEOUT_S = 20.0


def queue_of(*messages: int | None) -> SimpleQueue[int | None]:
    """Returns a queue that holds these items."""
    queue: SimpleQueue[int | None] = SimpleQueue()
    for message in messages:
        queue.put(message)
    return queue


def test_messages_when_the_process_does_not_fork_then_all_up_to_the_end() -> None:
    assert list(send_beside_forks(queue_of(1, 2, None, 3))) == [1, 2]


def fork_and_ask_for_a_message() -> int:
    """Forks a child that asks for a message and gets it; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        os._exit(next(send_beside_forks(queue_of(7))))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_when_a_message_is_being_sent_then_waits_for_it_and_the_next_one_for_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forking, "SENT_TIMEOUT_S", TIMEOUT_S)
    watch_forks()
    messages = send_beside_forks(queue_of(1, 2))
    assert next(messages) == 1
    with ThreadPoolExecutor(1) as thread:
        forks = thread.submit(fork_and_ask_for_a_message)
        wait_for(lambda: get_fork_gate().is_held, "the fork's wait")
        assert not forks.done()
        assert next(messages) == 2  # the first has left; comes when the fork is over
        assert forks.result(TIMEOUT_S) == 7


def test_fork_when_a_message_does_not_leave_then_not_held_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "SENT_TIMEOUT_S", 0.01)
    watch_forks()
    messages = send_beside_forks(queue_of(1, 2))
    assert next(messages) == 1
    assert fork_and_ask_for_a_message() == 7
    assert next(messages) == 2


FORKING = """
import os, sys, time
from threading import Event, Thread
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tdserve.control import forking
from tdserve.control.connection import CHANNEL_OPTIONS, ControlConnection

forking.SENT_TIMEOUT_S = 60.0
connection = ControlConnection(sys.argv[1])
connection.wait_ready(60.0)
health = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1], options=CHANNEL_OPTIONS))
begun, is_answered = Event(), Event()

def ask():
    with forking.exclude_forks():
        begun.set()
        while not forking.get_fork_gate().is_held:
            time.sleep(0.001)
        health.Check.future(health_pb2.HealthCheckRequest()).result(20.0)
        is_answered.set()

Thread(target=ask).start()
begun.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if is_answered.is_set() else 7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_fork_when_the_process_has_but_our_channels_then_grpc_stops_only_when_ours_is_done() -> None:
    with serving(Answering()) as address:
        command = [sys.executable, "-c", FORKING, address]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=90.0, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


class Stream:
    """Stands for gRPC's end of a stream: messages come when the test gives them, and it counts requests for them."""

    def __init__(self) -> None:
        self.given: SimpleQueue[int] = SimpleQueue()
        self.num_asked = 0
        self.num_looked_at = 0

    def __next__(self) -> int:
        self.num_asked += 1
        return self.given.get(timeout=TIMEOUT_S)

    def is_active(self) -> bool:
        self.num_looked_at += 1
        return True


def test_fork_when_a_stream_is_read_then_its_next_message_is_asked_for_afterwards() -> None:
    stream, gate = Stream(), get_fork_gate()
    with ThreadPoolExecutor(1) as thread:
        messages = receive_beside_forks(stream)
        first = thread.submit(next, messages)
        wait_for(lambda: stream.num_asked == 1, "the stream to be asked")
        gate.hold()
        try:
            assert stream.num_looked_at == 1
            stream.given.put(1)
            assert first.result(TIMEOUT_S) == 1
            second = thread.submit(next, messages)
            wait_for(lambda: "1 waits" in repr(gate) or stream.num_asked == 2, "the thread that reads")
            assert stream.num_asked == 1
        finally:
            gate.go_on()
        stream.given.put(2)
        assert second.result(TIMEOUT_S) == 2
    messages.close()
    gate.hold()
    gate.go_on()
    assert stream.num_looked_at == 1  # it is read no more


class Still:
    """Stands for a method of a stub, and a call, of a gRPC that no longer responds."""

    def future(self, request: object, *, timeout: float) -> Still:
        return self

    def add_done_callback(self, callback: object) -> None:
        """Never calls it."""


def test_answer_when_grpc_stands_still_then_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "LATE_S", 0.02)
    with pytest.raises(
        DeadlineExceededError, match=r"gRPC, which hangs in this process, did not happen within 0\.01 s"
    ):
        wait_for_answer(Still(), None, timeout=0.01)


def test_begin_when_the_forking_thread_ends_something_itself_then_it_does_not_wait_for_itself() -> None:
    gate = get_fork_gate()
    gate.hold()
    try:
        with exclude_forks():
            pass
    finally:
        gate.go_on()


def fork_and_end() -> int:
    """Forks a child that does nothing; returns its exit code, -9 if it hangs."""
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    found = os.pidfd_open(pid)
    try:
        waiting = select.poll()  # select takes no descriptor above 1023
        waiting.register(found, select.POLLIN)
        if not waiting.poll(TIMEOUT_S * 1e3):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(found)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ask_for_ever(address: str, is_over: Event) -> None:
    """Opens connections and waits for a server that does not answer."""
    while not is_over.is_set():
        connection = ControlConnection(address)
        try:
            connection.wait_ready(0.3)
        except TDServeError:
            pass
        finally:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_listening", [True, False])
def test_fork_when_calls_wait_for_a_server_that_does_not_answer_then_the_child_goes_on(is_listening: bool) -> None:
    is_over = Event()
    with socket.socket() as silent, ThreadPoolExecutor(4) as threads:
        silent.bind(("127.0.0.1", 0))
        if is_listening:
            silent.listen(64)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        asking = [threads.submit(ask_for_ever, address, is_over) for _ in range(4)]
        try:
            for _ in range(5):  # each second one stood still, or aborted, where calls were waited for in gRPC
                assert fork_and_end() == 7
        finally:
            is_over.set()
        for each in asking:
            each.result(TIMEOUT_S)
