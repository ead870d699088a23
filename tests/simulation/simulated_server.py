"""A server of a simulation: a real control process with simulated workers, which crashes at any failpoint. The next one
begins with the files that it has left."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tdserve.base import failpoints
from tdserve.base.config import ServerConfig
from tdserve.base.failpoints import FAILPOINTS
from tdserve.control.servicer import SessionConnection
from tdserve.server.control_process import ControlProcess
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2
from tests.simulation.network import Link
from tests.simulation.simulated_worker import NoProcesses, SimulatedWorker
from tests.simulation.virtual_time import pause

RESTART_S = 0.5
"""Time from a crash to the next start."""

TRANSFER_TIMEOUT_S = 5.0

_life: contextvars.ContextVar[object] = contextvars.ContextVar("life", default=None)


class _Life:
    """One run of the control process, from its start to a crash."""

    def __init__(self, server: SimulatedServer, path: Path) -> None:
        self.context = contextvars.copy_context()
        self.context.run(_life.set, self)
        self.path = path
        self.tasks: dict[asyncio.Future[Any], None] = {}
        self.workers: list[SimulatedWorker] = []
        self._server = server
        self.root = Root.acquire(path)
        config = ServerConfig(
            root=str(path), num_workers=1, sync_interval_s=0.0, transfer_timeout_s=TRANSFER_TIMEOUT_S, **server.settings
        )
        self.control = self.context.run(
            lambda: ControlProcess(config, self.root, make_worker=self._make_worker, worker_processes=NoProcesses())
        )

    def _make_worker(self, *arguments: Any, **named: Any) -> SimulatedWorker:
        made = SimulatedWorker(*arguments, **named)
        made.choose_delay_s = self._server.choose_delay_s
        made.send_to_client = self._server.deliver_mail
        self.workers.append(made)
        return made

    def create_task(self, coroutine: Any) -> asyncio.Task[Any]:
        """Begins a task that ends with this life."""
        task: asyncio.Task[Any] = self.context.run(asyncio.ensure_future, coroutine)
        self.tasks[task] = None
        task.add_done_callback(lambda _: self.tasks.pop(task, None))
        return task

    async def start(self) -> None:
        self.control.restore()
        await self.control.start()

    async def bury(self) -> None:
        """Frees what a dead life holds; nobody sees what it still does to its files."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.control.stop()
        self.root.release()
        shutil.rmtree(self.path, ignore_errors=True)


class SimulatedServer:
    """A server, through all its crashes.

    Args:
        folder: Where its roots are.
        chance: Decides when what happens.
        settings: Fields of ``ServerConfig``.

    Attributes:
        crash_share: How likely a crash is at each failpoint.
        full_share: How likely the disk is full at each failpoint that may fail.
        num_crashes, num_full: How often these have happened, by failpoint.
        reached: How often each failpoint was reached.
    """

    def __init__(self, folder: Path, chance: random.Random, **settings: Any) -> None:
        self.crash_share = 0.0
        self.full_share = 0.0
        self.settings = settings
        self.num_crashes: Counter[str] = Counter()
        self.num_full: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.links: dict[int, Link] = {}
        self.num_calls = 0
        self._folder, self._chance = folder, chance
        self._num_roots = 0
        self._now: _Life | None = None
        self._is_up = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    @property
    def life(self) -> object:
        """The current run of the control process; None while there is none."""
        return self._now if self._is_up.is_set() else None

    def choose_delay_s(self) -> float:
        """Returns the time that a step takes: mostly very short."""
        return self._chance.random() ** 4 * 0.02

    # ------------------------------------------------------------ life and death

    async def start(self) -> None:
        """Starts on an empty root."""
        failpoints.on_reach = self._on_reach
        await self._begin(self._make_path())

    async def stop(self) -> None:
        """Ends for good."""
        if self._restarting is not None:
            await self._restarting
        failpoints.on_reach = None
        life, self._now = self._now, None
        self._is_up.clear()
        if life is not None:
            await life.bury()

    async def wait_up(self) -> None:
        """Waits until a server can be reached."""
        await self._is_up.wait()

    def crash(self, where: str) -> None:
        """Ends the control process and its workers as by SIGKILL, at this very moment."""
        life = self._now
        if life is None or not self._is_up.is_set():
            return
        self.num_crashes[where] += 1
        self._is_up.clear()
        self._now = None
        path = self._make_path()
        _copy_root(str(life.path), str(path))
        for link in list(self.links.values()):
            link.cut()
        self._restarting = _outside(self._restart(life, path))

    async def _restart(self, life: _Life, path: Path) -> None:
        try:
            await life.bury()
            await pause(RESTART_S * self._chance.random())
            await self._begin(path)
        except BaseException as failure:
            self.failure = failure
            raise

    async def _begin(self, path: Path) -> None:
        life = _Life(self, path)
        self._now = life
        await life.create_task(life.start())
        self._is_up.set()

    def _make_path(self) -> Path:
        self._num_roots += 1
        return self._folder / f"root{self._num_roots}"

    def _on_reach(self, name: str) -> None:
        life = _life.get()
        if life is None or life is not self._now:
            return
        self.reached[name] += 1
        if FAILPOINTS[name].fails and self._chance.random() < self.full_share:
            self.num_full[name] += 1
            fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise fault
        if self._chance.random() < self.crash_share:
            self.crash(name)

    def kill_worker(self) -> None:
        """Ends the process of a worker."""
        if self._now is not None and self._is_up.is_set():
            worker = self._chance.choice(self._now.workers)
            self._now.context.copy().run(worker.die)

    # ------------------------------------------------------------ clients

    def open(self, link: Link) -> bool:
        """Has the control process serve a link; returns False if there is no process."""
        life = self._now
        if life is None or not self._is_up.is_set():
            return False
        connection = SessionConnection(link)
        life.create_task(self._serve(life, connection, link))
        return True

    async def _serve(self, life: _Life, connection: SessionConnection, link: Link) -> None:
        try:
            await life.control.serve_session(connection, link.iter_messages())
        finally:
            link.cut()

    def take_mail(self, session: int, worker: int, content: bytes) -> None:
        """Passes on what a client has mailed to its data worker."""
        life = self._now
        if life is not None and self._is_up.is_set():
            life.context.copy().run(life.workers[worker].take_mail, session, content)

    def deliver_mail(self, session: int, content: bytes) -> None:
        """Passes on what a data worker has mailed."""
        link = self.links.get(session)
        if link is not None:
            link.mail_to_client(control_pb2.ServerMessage.FromString(content))


def _outside(coroutine: Any) -> asyncio.Task[Any]:
    """Begins a task that belongs to no life."""
    context = contextvars.copy_context()
    context.run(_life.set, None)
    task: asyncio.Task[Any] = context.run(asyncio.ensure_future, coroutine)
    return task


def _copy_root(source: str, target: str) -> None:
    """Copies the files of a root, for half the price of ``shutil.copytree``: crashes are what costs most."""
    os.mkdir(target)
    for entry in os.scandir(source):
        path = f"{target}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            _copy_root(entry.path, path)
        elif entry.name != "lock.mdb" and not entry.name.endswith(".sock"):
            _copy(entry.path, path)


def _copy(source: str, target: str) -> None:
    from_fd = os.open(source, os.O_RDONLY)
    to_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size, offset = os.fstat(from_fd).st_size, 0
        os.truncate(to_fd, size)
        while offset < size:
            try:
                offset = os.lseek(from_fd, offset, os.SEEK_DATA)
            except OSError:  # there is only a hole
                break
            end = os.lseek(from_fd, offset, os.SEEK_HOLE)
            os.lseek(to_fd, offset, os.SEEK_SET)
            while offset < end:
                offset += os.sendfile(to_fd, from_fd, offset, end - offset)
    finally:
        os.close(from_fd)
        os.close(to_fd)
