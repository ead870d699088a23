"""A process that the server starts for a task of its own, and that is an ordinary client of it.

It is started once requests are served, and again whenever it dies. Its settings come as a line of JSON on its standard
input (``tdserve.base.client_setup``), on whose end it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tdserve.base.machine import count_oom_kills
from tdserve.server.processes.exit_reasons import explain_exit
from tdserve.server.processes.workers import EXIT_GRACE_S, MAX_RESTART_BACKOFF_S, RESTART_BACKOFF_S, compute_backoff_s

_log = logging.getLogger("tdserve.server")


class ClientProcess:
    """Such a process, through all its restarts.

    Args:
        name: Names it in log lines.
        module: What ``python -m`` runs.
        fds: Descriptors that it inherits.

    Attributes:
        num_restarts: Times that it was started again.
    """

    def __init__(self, name: str, module: str, *, fds: Sequence[int] = ()) -> None:
        self._name = name
        self._module = module
        self._fds = fds
        self.num_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self, setup: Mapping[str, Any]) -> None:
        """Starts the process and keeps it alive until ``stop``.

        Args:
            setup: Its settings; ``num_restarts`` is added.
        """
        self._task = asyncio.create_task(self._supervise(setup), name=f"tdserve-{self._name}")

    async def stop(self) -> None:
        """Ends the process. Idempotent."""
        self._is_stopping = True
        process, self._process = self._process, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if process is not None and process.returncode is None:
            await _end(process)

    async def _supervise(self, setup: Mapping[str, Any]) -> None:
        backoff_s = RESTART_BACKOFF_S
        while not self._is_stopping:
            started_s, num_oom_kills = time.monotonic(), count_oom_kills()
            try:
                process = self._process = await self._start({**setup, "num_restarts": self.num_restarts})
            except OSError as fault:
                _log.error("the %s process cannot be started: %s", self._name, fault)
                await asyncio.sleep(MAX_RESTART_BACKOFF_S)
                continue
            exit_code = await process.wait()
            self._process = None
            lived_s = time.monotonic() - started_s
            backoff_s = compute_backoff_s(backoff_s, lived_s)
            why = explain_exit(exit_code, num_oom_kills=count_oom_kills() - num_oom_kills)
            _log.warning("the %s process died after %.1f s (%s), starting it again", self._name, lived_s, why)
            self.num_restarts += 1
            await asyncio.sleep(backoff_s)

    async def _start(self, setup: Mapping[str, Any]) -> asyncio.subprocess.Process:
        # By this thread, and within milliseconds (vfork), like data workers: the process ends with its parent thread.
        command = [sys.executable, "-m", self._module]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, pass_fds=self._fds)
        if process.stdin is not None:
            process.stdin.write(json.dumps(setup).encode() + b"\n")
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
