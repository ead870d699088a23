from __future__ import annotations

import gc
import subprocess
import sys
import time
from threading import Event

import pytest

from tdserve.client.session import process_exit
from tdserve.client.session.process_exit import ExitFlush, spend_exit_time

PROGRAM = """
import multiprocessing, os, sys
from tdserve.client.session.process_exit import call_at_exit

def report():
    print("child" if multiprocessing.parent_process() else "parent", flush=True)

def twice():
    call_at_exit(report)
    call_at_exit(report)

twice()
print("begun", flush=True)
child = multiprocessing.get_context("fork").Process(target=twice)
child.start()
child.join()
print("joined", flush=True)
"""


EARLY = """
from concurrent.futures import ThreadPoolExecutor
from tdserve.client.session.process_exit import call_before_executors_end, call_at_exit

threads = ThreadPoolExecutor(1)

def report():
    try:
        print(threads.submit(lambda: "done").result(), flush=True)
    except RuntimeError:
        print("refused", flush=True)

call_at_exit(report)
call_before_executors_end(report)
call_before_executors_end(report)
"""


def test_early_call_when_the_process_ends_then_executors_still_take_work() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=True, timeout=60)
    said = done.stdout.split()
    assert said[0] == "done"
    assert set(said[1:]) == {"refused"}


def test_call_when_the_process_ends_then_done_in_it_and_in_a_fork_of_multiprocessing_alike() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    said = done.stdout.split()
    assert said[:3] == ["begun", "child", "joined"]
    assert set(said[3:]) == {"parent"}


class Holder:
    """An object that holds rows."""


@pytest.mark.slow
def test_flush_when_there_are_several_then_all_have_begun_before_any_is_waited_for_and_share_the_time() -> None:
    begun: list[Holder] = []
    finished: dict[Holder, tuple[float, int]] = {}

    def finish(holder: Holder, end_s: float) -> None:
        finished[holder] = (end_s, len(begun))

    flush = ExitFlush(finish, begin=begun.append)
    holders = [Holder(), Holder()]
    for holder in holders:
        flush.add(holder)
    flush.add(Holder())
    gc.collect()  # the last one has gone
    flush.run()
    assert set(begun) == finished.keys() == set(holders)
    assert len(set(finished.values())) == 1
    assert finished[holders[0]][1] == len(holders)


def test_flush_when_earlier_ones_have_used_the_time_then_the_rest_is_kept_for_clients_that_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with spend_exit_time(1_000.0) as end_s:
        left_s = end_s - time.monotonic()  # other tests may have used some
    monkeypatch.setattr(process_exit, "EXIT_S", process_exit.EXIT_S - left_s + 60.0)
    monkeypatch.setattr(process_exit, "EXIT_END_S", 59.8)
    allowed: list[float] = []

    def finish(_: Holder, end_s: float) -> None:
        allowed.append(end_s - time.monotonic())
        Event().wait(max(allowed[-1], 0.0))

    holder, flushes = Holder(), [ExitFlush[Holder](finish), ExitFlush[Holder](finish)]
    for flush in flushes:
        flush.add(holder)
        flush.run()
    assert 0.0 < allowed[0] <= 0.2
    assert allowed[1] <= 0.0
    with spend_exit_time(1_000.0) as end_s:
        assert 0.2 < end_s - time.monotonic() <= 59.8
