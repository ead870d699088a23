"""Child processes of the benchmark, and the JSON lines that both ends exchange."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tdserve.base.errors import LocalProtocolError, PeerLostError, TDServeError
from tdserve.transport.rendezvous import KVStore

PACKAGE_FOLDER = Path(__file__).parents[2]
"""Children start here, so that ``-m tdserve...`` finds this package, installed or not."""

EXIT_TIMEOUT_S = 5.0
"""A child ends when its input ends. A child that is stuck needs longer, and is killed."""


class LinePipe:
    """JSON messages over a pair of pipes, one per line. A thread reads them, so that a rendezvous can go on meanwhile.

    Lines with ``key`` and ``value`` feed ``kv_store``; ``receive`` returns all others. Threads: one caller.
    """

    def __init__(self, incoming: IO[str], outgoing: IO[str]) -> None:
        self.kv_store = KVStore(self._publish)
        self._incoming = incoming
        self._outgoing = outgoing
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="tdserve-bench-pipe", daemon=True)
        self._reader.start()

    def send(self, message: dict[str, Any]) -> None:
        """Writes one message.

        Raises:
            PeerLostError: Nobody reads any more.
        """
        try:
            self._outgoing.write(json.dumps(message) + "\n")
            self._outgoing.flush()
        except (OSError, ValueError) as error:
            raise PeerLostError(peer="the process at the other end", reason=str(error)) from error

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message and returns it; ``None`` at the end of the input."""
        return self._messages.get()

    def join(self) -> None:
        """Waits for the reading thread, which ends when the input ends."""
        self._reader.join()

    def _publish(self, key: str, value: bytes) -> None:
        self.send({"key": key, "value": value.hex()})

    def _read(self) -> None:
        try:
            for line in self._incoming:
                message = json.loads(line)
                if "key" in message:
                    self.kv_store.feed(message["key"], bytes.fromhex(message["value"]))
                else:
                    self._messages.put(message)
        finally:
            self.kv_store.close()
            self._messages.put(None)


class Child:
    """The process ``python -m module arguments``, which takes and answers orders in JSON lines.

    ``close`` leaves no process behind. Threads: one caller.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PACKAGE_FOLDER,
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends its children in its own order
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise LocalProtocolError(reason="a child process was started without pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pipe = LinePipe(self._stdout, self._stdin)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Sends an order."""
        self.pipe.send(message)

    def receive(self) -> dict[str, Any]:
        """Waits for the next answer and returns it.

        Raises:
            PeerLostError: The process ended. It wrote its error to standard error.
        """
        message = self.pipe.receive()
        if message is None:
            raise PeerLostError(peer=self._name, reason="the process ended; its error stands above")
        return message

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends an order and returns the answer."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """Ends the input of the process and waits for its end; kills it if it does not end."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            self._process.poll()  # it is gone already, and an order was lost with it
        try:
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.pipe.join()
        self._stdout.close()


def run_child(work: Callable[[LinePipe], None], *, ends: tuple[type[TDServeError], ...] = ()) -> int:
    """Works with the pipe to the benchmark, in a child; returns the exit status.

    Args:
        work: Follows the orders until the input ends.
        ends: Errors which mean that the benchmark ended in the middle of a round. They are not printed.
    """
    pipe = LinePipe(sys.stdin, sys.stdout)
    status = 0
    try:
        work(pipe)
    except ends:
        status = 1
    pipe.join()  # its thread must not hold standard input while the interpreter ends
    return status
