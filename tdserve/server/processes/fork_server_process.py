"""The process that forks data workers, as the control process sees it.

It imports torch, for which a remote client waits whose server was started again. So it starts before the control
process imports what that needs, and this module imports little.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tdserve.base.config import build_single_threaded_environment
from tdserve.base.errors import PeerLostError
from tdserve.base.machine import count_oom_kills
from tdserve.server.processes.exit_reasons import explain_exit

NUM_LOOKS = 10
"""Looks without a sign of life before a process is killed. They are counted, and no clock is read: a control process
that was itself stopped has looked only once meanwhile, and then reads what the others have sent."""

START_TIMEOUT_S = 120.0
"""Limit for a process that sends no sign of life before it is ready: it imports torch in 2 s, on a busy machine in
20."""

QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
"""Unless the user has set it. torch writes lines of its own, in no form of our log, about errors that it raises
too."""

_MAX_ANSWER_BYTES = 1 << 12

_log = logging.getLogger("tdserve.server")


class ForkServerProcess:
    """The fork server, as the control process sees it; when it dies, so do all processes that it has forked.

    Args:
        timeout_s: Time without an answer after which it counts as hung, and is killed.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._last_request = 0
        self._is_lost = False
        self._num_oom_kills = count_oom_kills()
        self.is_ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        command = [sys.executable, "-m", "tdserve.worker.fork_server", str(theirs.fileno())]
        try:
            # Blocks for a few milliseconds (vfork). The thread of the event loop does it: the process ends with its
            # parent thread.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Kernels that share out processor time by session (autogroup) would have it import in the time of this
                # process, and this one in its.
                start_new_session=True,
                env=QUIET_TORCH | build_single_threaded_environment(),
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can answer requests, as far as is known."""
        return not self._is_lost and self._process.poll() is None

    async def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the answer to a request; sends one request at a time.

        Args:
            request: See ``tdserve.worker.fork_server``.
            fds: Descriptors to send along; the caller closes its own.

        Raises:
            PeerLostError: It is gone, and its workers are going too.
        """
        async with self._turn:
            if not self._is_lost:
                self._last_request += 1
                try:
                    return await self._ask({"number": self._last_request, **request}, fds)
                except asyncio.TimeoutError:
                    _log.warning("the process that forks data workers (%d) gave no answer: killing it", self.pid)
                except (OSError, ValueError):
                    pass  # of its socket, or of an empty answer: it is gone
                await self.reap()
        raise PeerLostError(peer="the process that forks data workers", reason="it died; another one will be started")

    async def _ask(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        while True:
            answer = await self._receive_answer(self._timeout_s if self.is_ready else START_TIMEOUT_S)
            self.is_ready = True
            if answer.get("number") == request["number"]:  # else of a request whose caller was cancelled
                return answer

    async def _receive_answer(self, timeout_s: float) -> dict[str, Any]:
        receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._socket, _MAX_ANSWER_BYTES))
        try:
            for _ in range(NUM_LOOKS):
                await asyncio.wait({receiving}, timeout=timeout_s / NUM_LOOKS)
                if receiving.done():
                    answer: dict[str, Any] = json.loads(receiving.result())
                    return answer
        finally:
            receiving.cancel()
        raise asyncio.TimeoutError

    def kill(self) -> None:
        """Kills it, and with it all that it has forked; pending requests fail."""
        self._is_lost = True
        self._process.kill()

    async def reap(self) -> None:
        """Reaps it after an unwanted death, and logs the reason."""
        was_lost, is_alive = self._is_lost, self._process.poll() is None
        await self.end()
        if not was_lost:
            num_oom_kills = count_oom_kills() - self._num_oom_kills
            why = explain_exit(self._process.returncode, num_oom_kills=num_oom_kills, was_killed=is_alive)
            _log.warning("the process that forks data workers (%d) died (%s), and they with it", self.pid, why)

    async def end(self) -> None:
        """Kills it, and waits until it is reaped."""
        self.kill()
        self._socket.close()
        await asyncio.to_thread(self._process.wait)

    def end_now(self) -> None:
        """Like ``end``, for a caller without a loop; blocks for milliseconds. Idempotent."""
        self.kill()
        self._socket.close()
        self._process.wait()


def start_fork_server(timeout_s: float) -> ForkServerProcess | None:
    """Starts a fork server, so that it imports. Returns None if that fails: the first fork tries again.

    Args:
        timeout_s: As for ``ForkServerProcess``.
    """
    with suppress(OSError):
        return ForkServerProcess(timeout_s=timeout_s)
    return None
