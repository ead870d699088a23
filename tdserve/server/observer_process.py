"""The process that shows the server's figures by HTTP: ``python -m tdserve.observer``, an ordinary client of it.

It is started once requests are served, and again whenever it dies. The socket is the control process's: a scrape that
comes while there is no observer waits in its queue for the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

from tdserve.base.addresses import join_address, parse_address
from tdserve.base.config import ServerConfig
from tdserve.base.errors import InvalidRequestError
from tdserve.base.machine import count_oom_kills
from tdserve.server.worker_deaths import explain_death
from tdserve.server.workers import MAX_RESTART_BACKOFF_S, RESTART_BACKOFF_S, compute_rest_s

PACKAGES = ("prometheus_client", "starlette", "uvicorn")
"""What ``tdserve[observe]`` installs, and nothing else of tdserve needs."""

EXIT_GRACE_S = 2.0
"""Time in which the process can exit by itself once its input ends."""

BACKLOG = 128
"""Connections that wait while the process starts."""

_log = logging.getLogger("tdserve.server")


class ObserverProcess:
    """The observer, through all its restarts. Its socket is open from the beginning on.

    Args:
        config: Configuration of the server, with a port for metrics.

    Attributes:
        address: ``host:port`` at which it is reached.
        num_restarts: Times that it was started again.

    Raises:
        InvalidRequestError: Its packages are missing, or the port cannot be listened on. Nothing was started.
    """

    def __init__(self, config: ServerConfig) -> None:
        if missing := [package for package in PACKAGES if find_spec(package) is None]:
            reason = f"{missing[0]} is not installed: pip install 'tdserve[observe]'"
            raise InvalidRequestError(argument="metrics_port", reason=reason)
        self._config = config
        self._socket = _listen(config.metrics_host, config.metrics_port or 0)
        self.address = join_address(config.metrics_host, self._socket.getsockname()[1])
        self.num_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self, address: str, token: str | None) -> None:
        """Starts the process and keeps it alive until ``stop``.

        Args:
            address: Address of the server.
            token: Token of the observer itself; None if the server asks for none, and then a scrape needs none either.
        """
        setup = {
            "fd": self._socket.fileno(),
            "address": address,
            "token": token,
            "hosts": [self._config.metrics_host],
            "log_level": self._config.log_level,
        }
        supervising = self._supervise(json.dumps(setup).encode() + b"\n")
        self._task = asyncio.create_task(supervising, name="tdserve-observer")

    async def stop(self) -> None:
        """Ends the process and closes the socket. Idempotent."""
        self._is_stopping = True
        process, self._process = self._process, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if process is not None and process.returncode is None:
            await _end(process)
        self._socket.close()

    async def _supervise(self, setup: bytes) -> None:
        backoff_s = RESTART_BACKOFF_S
        while not self._is_stopping:
            started_s, num_oom_kills = time.monotonic(), count_oom_kills()
            try:
                process = self._process = await self._start(setup)
            except OSError as fault:
                _log.error("the observer cannot be started: %s", fault)
                await asyncio.sleep(MAX_RESTART_BACKOFF_S)
                continue
            exit_code = await process.wait()
            self._process = None
            lived_s = time.monotonic() - started_s
            backoff_s = compute_rest_s(backoff_s, lived_s)
            why = explain_death(exit_code, num_oom_kills=count_oom_kills() - num_oom_kills)
            _log.warning("the observer died after %.1f s (%s), starting it again", lived_s, why)
            self.num_restarts += 1
            await asyncio.sleep(backoff_s)

    async def _start(self, setup: bytes) -> asyncio.subprocess.Process:
        # By this thread, and within milliseconds (vfork), like data workers: the process ends with its parent thread.
        command = [sys.executable, "-m", "tdserve.observer"]
        fds = [self._socket.fileno()]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, pass_fds=fds)
        if process.stdin is not None:
            process.stdin.write(setup)
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), EXIT_GRACE_S)
        return
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _listen(host: str, port: int) -> socket.socket:
    plain, _ = parse_address("metrics_host", host)
    try:
        family, _, _, _, target = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(target)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as fault:
        reason = f"{join_address(host, port)} cannot be listened on: {fault}"
        raise InvalidRequestError(argument="metrics_port", reason=reason) from fault
    return listening
