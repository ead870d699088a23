"""The processes of data workers. A fork server, which has imported torch once for all, forks each within milliseconds.

The control process does not fork itself: it has threads, and has imported nothing that a worker needs. The end of a
worker is proved by a pipe whose other end only that worker holds: the kernel closes it when the last thread of the
worker has released its memory, so that nothing it did continues. This holds whatever ended the worker, and whether or
not its parent lives.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, suppress

from tdserve.base.config import ServerConfig
from tdserve.base.errors import CapacityError, ClosedError, PeerLostError
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.framing import HANDED_SOCKET
from tdserve.server.processes.fork_server_process import ForkServerProcess, start_fork_server

REAP_PAUSE_S = 0.01
"""Pause between looks for the exit code of a process that is gone: the kernel mostly has it within microseconds."""


class WorkerProcess:
    """One process of a data worker, from its fork to its end.

    Args:
        fork_server: Process that forks it.
        connection: This process's end of the socket to it; its next owner closes it.
        handover: This process's end of the socket that hands it others; closed here when it is gone.
        life_fd: Pipe whose other end it holds; closed here when it is gone.

    Attributes:
        pid: Its process id; 0 until it was forked.
        was_killed: Whether ``kill`` was called.
    """

    pid = 0
    was_killed = False

    def __init__(
        self, fork_server: ForkServerProcess, connection: socket.socket, handover: socket.socket, life_fd: int
    ) -> None:
        handover.setblocking(False)
        self.connection = connection
        self._handover = handover
        self._fork_server = fork_server
        self._life_fd = life_fd
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(life_fd, self._on_gone)

    def hand_over(self, session: int, channel_number: int, connection: socket.socket) -> None:
        """Hands it a socket of its own to the stream of a session's channel; the caller closes the one given.

        Raises:
            PeerLostError: The process is gone, or takes no sockets.
        """
        try:
            socket.send_fds(self._handover, [HANDED_SOCKET.pack(session, channel_number)], [connection.fileno()])
        except OSError as fault:
            raise PeerLostError(peer=f"data worker process {self.pid}", reason=str(fault)) from fault

    async def wait_gone(self) -> None:
        """Waits until the process is proved gone."""
        await self._gone.wait()

    async def end(self, grace_s: float) -> None:
        """Waits until the process is proved gone; kills it if it does not exit by itself within ``grace_s``."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._gone.wait(), grace_s)
        if not self._gone.is_set():
            await self.kill()
        await self._gone.wait()

    async def kill(self) -> None:
        """Sends SIGKILL, unless the process was reaped. If the fork server is gone, the process ends with it."""
        self.was_killed = True
        with suppress(PeerLostError):
            await self._fork_server.ask({"kill": True, "pid": self.pid})

    async def reap(self) -> int | None:
        """Returns the exit code of a process that is gone; None if it died with its parent."""
        try:
            while "ends" in (answer := await self._fork_server.ask({"reap": True, "pid": self.pid})):  # noqa: ASYNC110
                await asyncio.sleep(REAP_PAUSE_S)
            exit_code: int = answer["exit_code"]
        except PeerLostError:
            if os.getpid() == 1:  # first in its container, so it inherits orphans
                await asyncio.to_thread(_wait_for_orphan, self.pid)
            return None
        return exit_code

    def _on_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._life_fd)
        os.close(self._life_fd)
        self._handover.close()
        self._gone.set()


class WorkerProcesses:
    """The source of data workers' processes.

    Args:
        root_fd: Descriptor of the root's lock. Each worker holds it too, since it may still write when this process is
            gone.
        timeout_s: Time without an answer after which the fork server counts as hung, and is killed.
        fork_server: One that was started before; None: ``start`` does it.
    """

    def __init__(
        self,
        root_fd: int | None = None,
        *,
        timeout_s: float = ServerConfig.worker_timeout_s,
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self._root_fd = root_fd
        self._timeout_s = timeout_s
        self._fork_server = fork_server
        self._is_closed = False

    @property
    def fork_server_pid(self) -> int:
        """Process id of the fork server; 0 if none was started yet."""
        return self._fork_server.pid if self._fork_server is not None else 0

    def start(self) -> None:
        """Starts the fork server, so that it imports, unless it was started before; if that fails, the first fork tries
        again."""
        if self._fork_server is None:
            self._fork_server = start_fork_server(self._timeout_s)

    async def fork(self, arguments: WorkerArguments) -> WorkerProcess:
        """Returns a new process.

        Raises:
            OSError, CapacityError: Descriptors, processes or memory are short; a later attempt may succeed.
            PeerLostError: The fork server has died.
            ClosedError: ``close`` was called.
        """
        fork_server = await self._get_living()
        with ExitStack() as theirs, ExitStack() as ours:
            connection, end = socket.socketpair()
            theirs.callback(end.close)
            ours.callback(connection.close)
            handover, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.callback(taken.close)
            ours.callback(handover.close)
            life_fd, held_fd = os.pipe()
            theirs.callback(os.close, held_fd)
            process = WorkerProcess(fork_server, connection, handover, life_fd)
            fds = [fd for fd in (end.fileno(), taken.fileno(), held_fd, self._root_fd) if fd is not None]
            try:
                answer = await fork_server.ask({"fork": arguments.to_json(), "num_fds": len(fds)}, fds)
            except PeerLostError:  # perhaps between the fork and its answer
                theirs.close()
                await process.wait_gone()
                raise
            if "errno" in answer:
                raise CapacityError(what=f"another process: {os.strerror(answer['errno'])}", asked=1)
            process.pid = answer["pid"]
            ours.pop_all()
        return process

    def close(self) -> None:
        """Refuses further forks, and kills a fork server that is still importing: nothing waits for it any more."""
        self._is_closed = True
        if self._fork_server is not None and not self._fork_server.is_ready:
            self._fork_server.kill()

    async def stop(self) -> None:
        """Ends the fork server; call it when all processes that it has forked are gone."""
        self.close()
        if self._fork_server is not None:
            await self._fork_server.end()

    async def _get_living(self) -> ForkServerProcess:
        while (found := self._fork_server) is not None and not found.is_alive:
            await found.reap()
            if self._fork_server is found:
                self._fork_server = None
        if self._is_closed:
            raise ClosedError(what="the server's start of data workers")
        if self._fork_server is None:
            self._fork_server = ForkServerProcess(timeout_s=self._timeout_s)
        return self._fork_server


def _wait_for_orphan(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
