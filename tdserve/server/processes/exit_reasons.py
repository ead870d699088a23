"""Explains why a data worker has ended, from its exit code and the kernel's counters."""

from __future__ import annotations

import signal

from tdserve.base.machine import EXIT_NO_DESCRIPTORS

_CAUSES: dict[int, str] = {
    signal.SIGABRT: "gloo failed: its port received bytes that are not from tdserve, or no file descriptor was left; "
    "or LMDB met a damaged page of values, which `tdserve check` names",
    signal.SIGBUS: "a page of a mapped file is missing: another process truncated it, or its disk is full; or LMDB met "
    "a damaged page of values, which `tdserve check` names",
    signal.SIGSEGV: "a fault in native code; LMDB may have met a damaged page of values, which `tdserve check` names",
}
"""The likely cause, by signal; all of them were observed."""


def may_be_damage(exit_code: int | None) -> bool:
    """Returns whether a damaged page of LMDB may have ended a process."""
    return exit_code is not None and -exit_code in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)


def is_from_outside(exit_code: int | None, num_oom_kills: int = 0, was_killed: bool = False) -> bool:
    """Returns whether another process has killed a worker, whatever it was doing; arguments as in ``explain_exit``."""
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return not (num_oom_kills or was_killed) and (exit_code is None or -exit_code in signals)


def explain_exit(exit_code: int | None, num_oom_kills: int = 0, was_killed: bool = False) -> str:
    """Returns how a worker ended and the likely cause, for the log.

    Args:
        exit_code: As ``subprocess.Popen.returncode``; None: it ended with the process that had forked it.
        num_oom_kills: Number of processes that the kernel killed for lack of memory while the worker lived.
        was_killed: Whether this process has killed it.
    """
    if exit_code is None:
        return "with the process that forks data workers"
    if exit_code == EXIT_NO_DESCRIPTORS:
        return "it had no file descriptors left; strangers may have connected to its gloo port, see its log lines"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    number = -exit_code
    if number == signal.SIGKILL and was_killed:
        cause = "this server killed it, since it was silent or did not leave in time"
    elif number == signal.SIGKILL:
        cause = "the kernel ran out of memory" if num_oom_kills else "another process killed it; there was memory left"
    else:
        cause = _CAUSES.get(number, "")
    return ": ".join(filter(None, (_name_signal(number), cause)))


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
