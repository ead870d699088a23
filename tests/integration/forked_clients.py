"""Client processes that start within milliseconds: one process imports torch, and forks a child for every client.

``ForkedClients`` is the test's end. The program, ``python -m tests.integration.forked_clients MODULE...``, reads
orders, and runs each role, a function of one of the modules, in a child of its own; what a child prints is a line with
its number in front.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from tdserve.base.machine import die_with_parent
from tests.processes import REPOSITORY, START_TIMEOUT_S, alarm, state_of, wait_for

ROLES = ("tests.integration.local_roles", "tests.integration.programs", "tests.integration.fleet")
"""Modules whose functions children run by default."""


TIMEOUT_S = 60.0
"""Timeout for a child's next line: it may share two cores with a dozen others."""


class Child:
    """A client process. As a context manager it ends the process.

    Attributes:
        pid: Id of the process.
        has_ended: Whether its end was reported; a process that it left behind may still print lines.
    """

    def __init__(self, forked_clients: ForkedClients, number: int) -> None:
        self.forked_clients = forked_clients
        self.number = number
        self.has_ended = False
        self.pid = int(self.line().split()[1])

    def line(self, *, timeout_s: float = TIMEOUT_S) -> str:
        """Returns the next line that it prints. The last one is ``"ended STATUS"`` (minus the signal's number for a
        killed process)."""
        return next_line([self], timeout_s=timeout_s)[1]

    def rest(self) -> list[str]:
        """Returns all further lines but the last."""
        lines = []
        while not self.has_ended:
            lines.append(self.line())
        return lines[:-1]

    def kill(self) -> None:
        """Ends it with SIGKILL and waits for its end."""
        self.signal(signal.SIGKILL)
        self.rest()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Waits until SIGSTOP has stopped it."""
        wait_for(lambda: state_of(self.pid) == "T", f"a stop of process {self.pid}", timeout_s=TIMEOUT_S)

    def wait_killed(self) -> None:
        """Waits until SIGKILL has ended it; fails if it prints another line."""
        assert self.line() == f"ended {-signal.SIGKILL}"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGKILL)


class ForkedClients:
    """Starts client processes. As a context manager it ends them all.

    Args:
        roles: Modules whose functions the children run.
    """

    def __init__(self, *roles: str) -> None:
        program = ("tests.lent.program", "tests.integration.forked_clients")
        command = [sys.executable, "-m", *program, *(roles or ROLES)]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: list[deque[str]] = []

    def start(self, role: str, *arguments: Any, **named: Any) -> Child:
        """Starts a process that runs a role.

        Args:
            role: A function of the modules.
            *arguments, **named: As JSON knows them.
        """
        assert self._process.stdin is not None
        self._said.append(deque())
        self._process.stdin.write(json.dumps([role, arguments, named]) + "\n")
        self._process.stdin.flush()
        return Child(self, len(self._said) - 1)

    def line_of(self, numbers: Sequence[int], *, timeout_s: float) -> tuple[int, str]:
        """Returns the first unread line of some children, with the child that printed it."""
        assert self._process.stdout is not None
        with alarm(timeout_s, f"a line of children {numbers}"):
            while not (speakers := [number for number in numbers if self._said[number]]):
                line = self._process.stdout.readline()
                assert line, "the process that forks clients has ended"
                speaker, _, words = line.rstrip("\n").partition(" ")
                self._said[int(speaker)].append(words)
        return speakers[0], self._said[speakers[0]].popleft()

    def __enter__(self) -> ForkedClients:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.kill()
        self._process.wait(START_TIMEOUT_S)


def next_line(children: Sequence[Child], *, timeout_s: float) -> tuple[int, str]:
    """Returns the next line that one of these children prints, with the child's position; the end of a child is no
    failure."""
    number, line = children[0].forked_clients.line_of([child.number for child in children], timeout_s=timeout_s)
    assert not line.startswith("failed"), line.replace(" | ", "\n")
    place = next(place for place, child in enumerate(children) if child.number == number)
    children[place].has_ended |= line.startswith("ended")
    return place, line


@cache
def shared() -> ForkedClients:
    """Returns the process that forks clients for this test process, with all of ``ROLES``; it ends with the process."""
    started = ForkedClients()
    atexit.register(started.__exit__)
    return started


def say(child: int, *words: object) -> None:
    """Writes one line at once, so that the lines of several children do not mix."""
    os.write(1, (" ".join(map(str, (child, *words))) + "\n").encode())


def main() -> None:
    """Runs the program that the module describes."""
    # Imported before the forks, which is the purpose of this program; opens neither sockets nor threads.
    modules = [importlib.import_module(name) for name in sys.argv[1:]]
    roles = {name: play for module in reversed(modules) for name, play in vars(module).items()}
    running: dict[int, int] = {}

    def on_child(number: int, frame: object) -> None:
        while running:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            say(running.pop(pid), "ended", os.waitstatus_to_exitcode(status))

    signal.signal(signal.SIGCHLD, on_child)
    for child, order in enumerate(sys.stdin):
        role, arguments, named = json.loads(order)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # its end must not be reported before its beginning
        pid = os.fork()
        if not pid:
            _live(child, roles[role], arguments, named)
        running[pid] = child
        say(child, "pid", pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _live(child: int, play: Any, arguments: list[Any], named: dict[str, Any]) -> None:
    """Runs a child from its beginning to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background begins with SIGINT ignored
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 1
    try:
        play(lambda *words: say(child, *words), *arguments, **named)
        status = 0
    except BaseException:  # noqa: BLE001 (the outermost frame of this process)
        say(child, "failed", traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
