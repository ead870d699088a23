from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tdserve.client.session.process_exit import ExitFlush

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
