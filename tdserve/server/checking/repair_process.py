"""Runs repairs of LMDB's environments in a process of their own, which a damaged page may end."""

from __future__ import annotations

import json
import os
import signal

from tdserve.base.errors import CorruptDataError
from tdserve.server.checking.findings import Outcome, Repair, try_repair


def run_apart(repair: Repair, *, path: str) -> Outcome:
    """Runs a repair in a child, and returns what it has done.

    Args:
        repair: The repair.
        path: Path that it repairs, for errors.

    Raises:
        CorruptDataError: It failed, or has ended its process. What it had not committed was not changed.
    """
    answers, answering = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(answers)
            with os.fdopen(answering, "w") as pipe:
                outcome, reason = try_repair(repair)
                json.dump([outcome.done, [*outcome.losses], outcome.is_set_aside, reason], pipe)
        finally:
            os._exit(0)
    os.close(answering)
    with os.fdopen(answers) as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) or not answer:
        cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "a fault"
        actual = f"one at which LMDB ended the process ({cause}); restore the store from a checkpoint, or delete it"
        raise CorruptDataError(path=path, expected="a file that can be repaired", actual=actual)
    done, losses, is_set_aside, reason = json.loads(answer)
    if reason:
        raise CorruptDataError(path=path, expected="a file that can be repaired", actual=reason)
    return Outcome(done, losses=losses, is_set_aside=is_set_aside)
