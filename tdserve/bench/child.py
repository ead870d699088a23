"""Child processes of the benchmark: each runs one function, which talks with the benchmark over a pipe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from tdserve.base.errors import PeerLostError, TDServeError

PACKAGE_FOLDER = Path(__file__).parents[2]
"""Children start here, so that ``-m tdserve...`` finds this package, installed or not."""

EXIT_TIMEOUT_S = 5.0
"""A child ends when its pipe is closed. A child that is stuck needs longer, and is killed."""

STDERR_FD = 2


class Pipe(Protocol):
    """An end of the pipe: a ``Child``, or in the child a ``Connection``."""

    def send(self, message: Any, /) -> None:
        """Sends a message: anything that can be pickled."""

    def recv(self) -> Any:
        """Waits for a message and returns it."""


class Child:
    """A new process, not a fork, that runs a function of some module. ``close`` leaves no process behind.

    The function ends the process when it returns, and also when it reads from a pipe that the benchmark has closed.
    Threads: one caller.

    Args:
        work: The function. It gets its end of the pipe, and the arguments.
        arguments: Further arguments of it.
    """

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._name = work.__module__
        self._pipe, theirs = connection.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tdserve.bench.child"],
                stdin=theirs.fileno(),
                stdout=STDERR_FD,  # some libraries print; standard output is for figures
                cwd=PACKAGE_FOLDER,
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends its children in its own order
            )
        self.send((work, arguments))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Sends an order.

        Raises:
            PeerLostError: The process ended.
        """
        try:
            self._pipe.send(message)
        except OSError as error:
            raise PeerLostError(peer=self._name, reason=str(error)) from error

    def recv(self) -> Any:
        """Waits for the next answer and returns it.

        Raises:
            TDServeError: The function raised it.
            PeerLostError: The process ended. It wrote its error to standard error.
        """
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerLostError(peer=self._name, reason="the process ended; its error stands above") from error
        if isinstance(answer, TDServeError):
            raise answer
        return answer

    def ask(self, message: object) -> Any:
        """Sends an order and returns the answer."""
        self.send(message)
        return self.recv()

    def hang_up(self) -> None:
        """Closes the pipe, so that the process ends. Idempotent."""
        self._pipe.close()

    def close(self) -> None:
        """Closes the pipe and waits for the end of the process; kills it if it does not end."""
        self.hang_up()
        try:
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def open_children(num: int, work: Callable[..., None], *arguments: object) -> Iterator[list[Child]]:
    """Starts processes that all run the same function, and ends them together.

    Args:
        num: The number of processes.
        work: The function, as for ``Child``.
        arguments: Further arguments of it.
    """
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(work, *arguments))) for _ in range(num)]
        for child in children:
            stack.callback(child.hang_up)  # each takes a while to end: all do so at once
        yield children


def run_child() -> None:
    """Runs the function for which this process was started."""
    pipe: Pipe = connection.Connection(sys.stdin.fileno())
    with suppress(EOFError, ConnectionError):  # the benchmark has closed the pipe
        work, arguments = pipe.recv()
        try:
            work(pipe, *arguments)
        except TDServeError as error:
            pipe.send(error)


if __name__ == "__main__":
    run_child()
