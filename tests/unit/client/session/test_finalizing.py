"""Work of finalizers runs in another thread, whatever locks the interrupted thread holds."""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread

import pytest

from tdserve.client.session.finalizing import run_from_finalizer, wait_for_all

LIMIT_S = 20.0


def _fail() -> None:
    int("no number")


def _wait(go_on: Event) -> None:
    go_on.wait(LIMIT_S)


class _Dropped:
    """Something with a finalizer."""


def test_work_when_its_finalizer_runs_within_a_lock_that_it_needs_then_it_waits_for_that_alone() -> None:
    lock, done = Lock(), SimpleQueue[Thread]()

    def work() -> None:
        with lock:
            done.put(current_thread())

    dropped = _Dropped()
    weakref.finalize(dropped, run_from_finalizer, work)
    with lock:
        del dropped  # would never end if the finalizer did the work
        assert done.empty()
    assert done.get(timeout=LIMIT_S) is not current_thread()


def test_work_when_it_fails_then_it_is_logged_and_other_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done = Event()
    with caplog.at_level(logging.ERROR, logger="tdserve.client"):
        run_from_finalizer(_fail)
        run_from_finalizer(done.set)
        assert done.wait(LIMIT_S)
        assert wait_for_all(LIMIT_S)
    assert "could not be ended" in caplog.text


def test_work_when_the_program_exits_or_is_forked_then_only_its_own_process_waits_for_it() -> None:
    go_on = Event()
    run_from_finalizer(partial(_wait, go_on))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if wait_for_all(0.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not wait_for_all(0.0)
    go_on.set()
    assert wait_for_all(LIMIT_S)
