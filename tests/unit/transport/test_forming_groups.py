"""A process whose peer never connects ends with its own exit code."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import atexit, sys, threading, time
from tdserve.transport import channel_forming
from tdserve.transport.channel_forming import Forming
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.proven import leave_all_devices
from tdserve.transport.rendezvous import KVStore
from tests.gloo_secret import CREDENTIAL

def count_threads():
    print(sum(thread.name == "test-forming" for thread in threading.enumerate()), "threads", flush=True)

atexit.register(count_threads)  # called after the end of what is registered later
channel_forming.EXIT_TIMEOUT_S = 40.0
first, timeout_s = int(sys.argv[1]), float(sys.argv[2])
sent = []
begun = []

def form(store, rank):
    return Forming(
        lambda: GlooChannel(store, rank, host="127.0.0.1", credential=CREDENTIAL, peer="nobody", timeout_s=timeout_s),
        peer="nobody", name="test-forming")

absent = KVStore(lambda key, value: sent.append((key, value)))
form(absent, 1 - first)
while not sent:
    time.sleep(0.001)
leave_all_devices()
store = KVStore(lambda key, value: begun.append(key))
for key, value in sent:
    store.feed(key, value)
form(store, first)
while not begun:
    time.sleep(0.001)
print("ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "timeout_s"), [(0, 0.7), (1, 60.0)])
def test_process_when_it_ends_while_a_group_is_formed_then_cleanly_and_soon(rank: int, timeout_s: float) -> None:
    command = [sys.executable, "-c", PROGRAM, str(rank), str(timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ends\n"
        begun_s = time.monotonic()
        left, errors = process.communicate(timeout=60.0)
    assert (process.returncode, left) == (0, "0 threads\n"), errors
    assert "stranger" not in errors
    assert time.monotonic() - begun_s < 30.0, "it has ended their waits, and not waited for their timeout"
