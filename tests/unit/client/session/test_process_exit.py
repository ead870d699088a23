from __future__ import annotations

import subprocess
import sys

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
