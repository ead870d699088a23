"""Many client processes that start within a second: one process imports torch, and forks before it opens anything.

``Fleet`` is the test's end. The program, ``python -m tests.integration.fleet ADDRESS TASKS TRANSPORT``, runs each task
of ``tests.integration.roles`` in a child of its own; what a child says is a line with its number in front.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import tdserve
from tdserve.config import check_transport
from tests.integration.processes import START_TIMEOUT_S, Program

_PR_SET_PDEATHSIG = 1


class Fleet:
    """Client processes, one per task; a context manager, whose end is theirs.

    Args:
        server: Its address, for children that use gloo; or a client, whose transport they take.
        tasks: A role of ``tests.integration.roles`` and its arguments, each.

    Attributes:
        said: Lines of each child so far.
        pids: Process of each child.
    """

    def __init__(self, server: str | tdserve.Client, *tasks: tuple[str, dict[str, Any]]) -> None:
        address, transport = (server, "gloo") if isinstance(server, str) else (server.address, server.transport)
        self._program = Program(address, json.dumps(tasks), transport, module="tests.integration.fleet")
        self.said: list[list[str]] = [[] for _ in tasks]
        self.pids = [0] * len(tasks)

    def wait(self, is_reached: Callable[[Fleet], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Reads on until a state is reached. Fails the test when the children end, or one of them fails, before."""
        while not is_reached(self):
            line = self._program.line(timeout_s=timeout_s)
            assert line, f"all have ended, and had said {self.said}"
            child, _, words = line.partition(" ")
            kind, _, rest = words.partition(" ")
            assert kind != "failed", f"child {child}: {rest}"
            if kind == "pid":
                self.pids[int(child)] = int(rest)
            else:
                self.said[int(child)].append(words)

    def wait_all(self, word: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every child has said something that begins with a word."""

        def is_reached(fleet: Fleet) -> bool:
            return all(any(line.split()[0] == word for line in lines) for lines in fleet.said)

        self.wait(is_reached, timeout_s=timeout_s)

    def words(self, child: int, word: str) -> list[str]:
        """What stands behind a word in the lines of a child that begin with it."""
        return [line.partition(" ")[2] for line in self.said[child] if line.split()[0] == word]

    def numbers(self, child: int, word: str) -> list[int]:
        """All numbers of such lines, in order."""
        return [int(number) for rest in self.words(child, word) for number in rest.split()]

    def kill(self, child: int) -> None:
        """SIGKILL to a child."""
        os.kill(self.pids[child], signal.SIGKILL)

    def end(self) -> None:
        """SIGKILL to all children; what they have said before is there afterwards."""
        for child in range(len(self.pids)):
            self.kill(child)
        for line in self._program.rest():
            number, _, words = line.partition(" ")
            self.said[int(number)].append(words)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.__exit__(None, None, None)


def say(child: int, *words: object) -> None:
    """One line, written at once: those of the children do not mix."""
    os.write(1, (" ".join(map(str, (child, *words))) + "\n").encode())


def main() -> None:
    """See the module."""
    # Imported before the forks, which is what this program is for; opens neither sockets nor threads.
    from tests.integration import roles

    address, tasks, roles.transport = sys.argv[1], json.loads(sys.argv[2]), check_transport(sys.argv[3])
    children = set()
    for child, (role, arguments) in enumerate(tasks):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            say(child, "pid", os.getpid())
            status = 1
            try:
                roles.ROLES[role](address, lambda *words, child=child: say(child, *words), **arguments)
                status = 0
            except BaseException:  # noqa: BLE001 (the outermost frame of this process)
                say(child, "failed", traceback.format_exc().replace("\n", " | "))
            finally:
                os._exit(status)
        children.add(pid)
    while children:
        children.discard(os.wait()[0])


if __name__ == "__main__":
    main()
