from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from tdserve.base.errors import ServerBusyError
from tdserve.base.machine import EXIT_NO_DESCRIPTORS, count_descriptors
from tdserve.transport.strangers import Sockets
from tdserve.worker import descriptors
from tdserve.worker.descriptors import DescriptorWatch, check_room
from tests.channel_pairs import gloo_pair
from tests.processes import wait_for
from tests.stranger import device_of_this_process


def test_look_when_strangers_take_descriptors_then_the_port_is_shut_and_another_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, pair = DescriptorWatch(), gloo_pair()  # a pair keeps the device
    port, _ = device_of_this_process()
    with ExitStack() as stack:
        for end in pair:
            stack.callback(end.close)
        for _ in range(descriptors.MIN_STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert watch.look() == 0  # there are many more descriptors
        monkeypatch.setattr(descriptors, "get_descriptor_limit", lambda: count_descriptors() + 5)
        wait_for(lambda: DescriptorWatch().look() >= descriptors.MIN_STRANGERS, "all of them are accepted")
        assert "127.0.0.1" in caplog.text
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2)
    for end in gloo_pair():
        end.close()
    assert device_of_this_process()[0] != port


def test_look_when_all_descriptors_are_of_files_then_ports_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    port, _ = device_of_this_process()
    monkeypatch.setattr(descriptors, "get_descriptor_limit", lambda: count_descriptors() + 5)
    monkeypatch.setattr(descriptors, "MIN_STRANGERS", Sockets.from_this_process().num_strangers + 1)  # of other tests
    assert DescriptorWatch().look() == 0
    socket.create_connection(("127.0.0.1", port), timeout=5.0).close()


def test_check_room_when_few_are_left_then_server_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(1)
    limit = count_descriptors() + descriptors.MIN_FREE + 2
    monkeypatch.setattr(descriptors, "get_descriptor_limit", lambda: limit)
    check_room(1)
    with pytest.raises(ServerBusyError) as caught:
        check_room(4)
    assert caught.value.fields["limit"] == limit


@pytest.mark.slow
def test_watch_when_all_are_in_use_then_the_process_ends_and_prints_the_reason() -> None:
    program = """
import os, resource, time
from tdserve.worker.descriptors import DescriptorWatch
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
DescriptorWatch().start()
files = [open(os.devnull) for _ in range(96 - len(os.listdir("/proc/self/fd")))]
time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_NO_DESCRIPTORS
    assert "of 100 descriptors are in use" in ended.stderr


def test_close_when_started_then_the_thread_ends() -> None:
    others, watch = set(threading.enumerate()), DescriptorWatch()
    watch.start()
    (thread,) = set(threading.enumerate()) - others
    watch.close()
    assert not thread.is_alive()
