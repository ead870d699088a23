"""Servers that stand still, and calls that have to end in time all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import tdserve
from tests.processes import all_below, state_of, wait_for

LIMIT_S = 10.0
"""Limit for calls without a timeout of their own, many at once on a busy machine: alone they take 3 s, and beside three
other test runs 6.5 s. A call that waits for the server takes 30 s."""


def timed(call: Callable[[], object]) -> float:
    """Returns how many seconds a call takes until it gives up, or has read what this process can read by itself."""
    began_s = time.monotonic()
    with suppress(tdserve.TDServeError):
        call()
    return time.monotonic() - began_s


@contextmanager
def stopped(server: tdserve.Server) -> Iterator[None]:
    """Stops all processes of the server during the block."""
    pids = [server.pid, *all_below(server.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_for(lambda pid=pid: state_of(pid) == "T", f"process {pid} to stand still")  # type: ignore[misc]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def check_all_end_in_time(
    calls: Mapping[str, Callable[[], object]], meanwhile: AbstractContextManager[None] | None = None
) -> None:
    """Makes all calls at once and checks their times.

    Args:
        meanwhile: What happens while they are under way.
    """
    with ThreadPoolExecutor(len(calls)) as threads:
        took_s = threads.map(timed, calls.values())
        with meanwhile or nullcontext():
            found_s = dict(zip(calls, took_s, strict=True))
    late_s = {name: round(each_s, 2) for name, each_s in found_s.items() if each_s > LIMIT_S}
    assert not late_s, late_s
