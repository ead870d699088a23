from __future__ import annotations

import signal

import pytest

from tdserve.base.machine import EXIT_NO_DESCRIPTORS
from tdserve.server.processes.exit_reasons import explain_exit, is_from_outside


@pytest.mark.parametrize(
    ("exit_code", "num_oom_kills", "expected"),
    [
        (3, 0, "exit code 3"),
        (None, 0, "with the process that forks data workers"),
        (EXIT_NO_DESCRIPTORS, 0, "it had no file descriptors left"),
        (-signal.SIGKILL, 1, "SIGKILL: the kernel ran out of memory"),
        (-signal.SIGKILL, 0, "SIGKILL: another process killed it; there was memory left"),
        (-signal.SIGABRT, 0, "SIGABRT: gloo failed"),
        (-signal.SIGBUS, 0, "SIGBUS: a page of a mapped file is missing"),
        (-signal.SIGHUP, 0, "SIGHUP"),
        (-40, 0, "signal 40"),
    ],
)
def test_explain_death_when_a_worker_ended_then_names_how_and_the_likely_cause(
    exit_code: int | None, num_oom_kills: int, expected: str
) -> None:
    assert explain_exit(exit_code, num_oom_kills=num_oom_kills).startswith(expected)


def test_explain_death_when_this_server_killed_it_then_only_that_reason() -> None:
    why = explain_exit(-signal.SIGKILL, num_oom_kills=1, was_killed=True)
    assert why == "SIGKILL: this server killed it, since it was silent or did not leave in time"
    assert explain_exit(-signal.SIGBUS, was_killed=True).startswith("SIGBUS: a page of a mapped file is missing")


@pytest.mark.parametrize(
    ("exit_code", "num_oom_kills", "was_killed", "expected"),
    [
        (-signal.SIGKILL, 0, False, True),
        (-signal.SIGTERM, 0, False, True),
        (None, 0, False, True),
        (-signal.SIGKILL, 1, False, False),
        (-signal.SIGKILL, 0, True, False),
        (-signal.SIGBUS, 0, False, False),
        (1, 0, False, False),
    ],
)
def test_is_from_outside_when_a_worker_ended_then_only_for_the_kill_of_another_process(
    exit_code: int | None, num_oom_kills: int, was_killed: bool, expected: bool
) -> None:
    assert is_from_outside(exit_code, num_oom_kills, was_killed) is expected
