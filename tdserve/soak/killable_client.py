"""A client of a run, as its owner sees it: a process that is given rounds, and may be killed in one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

from tdserve.base.errors import PeerLostError
from tdserve.soak.round_stores import NUM_SLOTS

PROGRAM = (sys.executable, "-m")
PACKAGE_FOLDER = Path(__file__).parents[2]
"""Clients start here, so that ``-m tdserve...`` finds this package, installed or not."""

EXIT_TIMEOUT_S = 120.0
"""A thread of a client ends after the call in which it is, or is given up after ``TIMEOUT_S``."""


class KillableClient:
    """Starts a client, which connects at once; ``close`` leaves no process behind. Threads: one caller.

    Args:
        address: The server, or several.
        transport: Its transport.
        number: Number of the client, different for every process of a run.
        place: It overwrites the slots of this place, which is one of ``num_places``.
        num_places: Number of clients that work at the same time.
        program: What runs a module, without the module's name.
        environment: Its environment variables; None: those of this process.
    """

    def __init__(
        self,
        address: str,
        transport: str,
        *,
        number: int,
        place: int,
        num_places: int,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.transport = transport
        self.number = number
        num_slots = NUM_SLOTS // num_places
        arguments = [address, transport, number, place * num_slots, num_slots]
        self._process = subprocess.Popen(
            [*program, "tdserve.soak.working_client", *map(str, arguments)],
            cwd=PACKAGE_FOLDER,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the owner, which ends its clients in its own order
        )
        self._stdin, self._stdout = cast(TextIO, self._process.stdin), cast(TextIO, self._process.stdout)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def begin(self, prefix: str, folder: Path) -> None:
        """Begins a round, in which the client writes histories into a folder."""
        self._order({"prefix": prefix, "folder": str(folder)})

    def request_end(self) -> None:
        """Asks for the end of the round, and does not wait for it."""
        self._order(None)

    def await_end(self) -> None:
        """Waits for the end of the round, which each thread leaves after the call in which it is.

        Raises:
            PeerLostError: The process ended.
        """
        if self._stdout.readline() != "ended\n":
            raise PeerLostError(peer=f"client {self.number}", reason="its process ended; its error stands above")

    def _order(self, message: object) -> None:
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
        except OSError as error:
            raise PeerLostError(peer=f"client {self.number}", reason=str(error)) from error

    def kill(self) -> None:
        """Kills the process, and leaves nothing of it."""
        self._process.kill()
        self._release()

    def close(self) -> None:
        """Lets the client leave; kills it if that takes too long. Idempotent."""
        try:
            self._process.communicate(timeout=EXIT_TIMEOUT_S)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
        self._release()

    def _release(self) -> None:
        self._process.wait()
        for end in (self._stdin, self._stdout):
            try:
                end.close()
            except OSError:  # a line that the process did not read
                continue
