"""Many client processes that start within a second: children of ``ForkedClients`` in roles of
``tests.integration.roles``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import tdserve
from tdserve.base.config import check_transport
from tests.integration import forked_clients, roles
from tests.processes import START_TIMEOUT_S


class Fleet:
    """Client processes, one per task. As a context manager it ends them.

    Args:
        server: Address of the server, for children that use gloo; or a client, whose transport they use.
        tasks: The role of ``tests.integration.roles`` and the arguments of each child.

    Attributes:
        said: Lines of each child so far.
        pids: Process id of each child.
    """

    def __init__(self, server: str | tdserve.Client, *tasks: tuple[str, dict[str, Any]]) -> None:
        address, transport = (server, "gloo") if isinstance(server, str) else (server.address, server.transport)
        started = forked_clients.shared()
        self._children = [started.start("sail", address, transport, role, arguments) for role, arguments in tasks]
        self.said: list[list[str]] = [[] for _ in tasks]
        self.pids = [child.pid for child in self._children]

    def wait(self, is_reached: Callable[[Fleet], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Reads lines until a state is reached. Fails if the children end, or one of them fails, before."""
        while not is_reached(self):
            assert not all(child.has_ended for child in self._children), f"all have ended, and had said {self.said}"
            number, line = forked_clients.next_line(self._children, timeout_s=timeout_s)
            if not self._children[number].has_ended:
                self.said[number].append(line)

    def wait_all(self, word: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every child has printed a line that begins with a word."""

        def is_reached(fleet: Fleet) -> bool:
            return all(any(line.split()[0] == word for line in lines) for lines in fleet.said)

        self.wait(is_reached, timeout_s=timeout_s)

    def words(self, child: int, word: str) -> list[str]:
        """Returns the rest of a child's lines that begin with a word."""
        return [line.partition(" ")[2] for line in self.said[child] if line.split()[0] == word]

    def numbers(self, child: int, word: str) -> list[int]:
        """Returns all numbers in such lines, in order."""
        return [int(number) for rest in self.words(child, word) for number in rest.split()]

    def kill(self, child: int) -> None:
        """Sends SIGKILL to a child."""
        os.kill(self.pids[child], signal.SIGKILL)

    def end(self) -> None:
        """Sends SIGKILL to all children and reads their remaining lines."""
        for child in range(len(self.pids)):
            self.kill(child)
        for lines, killed in zip(self.said, self._children, strict=True):
            lines += killed.rest()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.__exit__()


def sail(say: Callable[..., None], address: str, transport: str, role: str, arguments: dict[str, Any]) -> None:
    """Runs a child's role."""
    roles.transport = check_transport(transport)
    roles.ROLES[role](address, say, **arguments)
