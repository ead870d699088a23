"""``tdserve.Server``: a server in processes of its own, owned by the process that made it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

import tdserve
from tdserve.base.config import ServerConfig
from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RemoteProtocolError,
    WrongStateError,
    list_error_classes,
)
from tdserve.server.start_lines import FAILED_PREFIX, READY_PREFIX

if TYPE_CHECKING:
    from tdserve.client.client import Client

START_TIMEOUT_S = 60.0
"""The fork server imports torch: this takes about three seconds, ten times as long on a busy machine."""

SHUTDOWN_TIMEOUT_S = 20.0
"""The default grace period of requests under way, and as much again for the processes to leave."""


class Server:
    """Starts and ends a server; a context manager. The server also ends when the process that started it does, even
    if forks of that process live on; in a fork the object does nothing.

    Args:
        root: Folder that the server owns; created if it is missing.
        host: Address to listen on; loopback by default.
        port: 0 takes a free one, which ``address`` shows.
        num_workers: Data workers; None is one, or one per device.
        devices: GPUs, one per data worker, such as ``["cuda:0", "cuda:1"]``.
        settings: Further fields of ``tdserve.base.config.ServerConfig``. ``log_level`` is ``"warning"`` by default:
            the lines appear among those of the program.

    Raises:
        InvalidRequestError: A setting is invalid, or there is none of this name. Nothing was started.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_workers: int | None = None,
        devices: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        _check_names(settings)
        self.config = ServerConfig(
            root=os.fspath(root) if isinstance(root, os.PathLike) else root,
            host=host,
            port=port,
            num_workers=max(len(devices), 1) if num_workers is None else num_workers,
            devices=tuple(devices),
            **{"log_level": "warning", **settings},
        ).validate()
        self._process: subprocess.Popen[str] | None = None
        self._lifeline_fd = -1
        self._owner_pid = -1
        self._address: str | None = None

    def __repr__(self) -> str:
        state = f"at {self._address}" if self.is_alive else "not running"
        return f"<Server of {self.config.root} {state}>"

    @property
    def address(self) -> str:
        """``host:port``. Raises WrongStateError before ``start``."""
        if self._address is None:
            raise WrongStateError(state="not started", event="address")
        return self._address

    @property
    def is_alive(self) -> bool:
        """Whether the control process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the control process. Raises WrongStateError before ``start``."""
        if self._process is None:
            raise WrongStateError(state="not started", event="pid")
        return self._process.pid

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> Server:
        """Starts the server and waits until it accepts connections; returns itself.

        Raises:
            RootInUseError, CorruptDataError, NotSupportedError, InvalidRequestError: It did not start; the error has
                the reason.
            DeadlineExceededError: It was not ready in time, and was ended.
            WrongStateError: It runs already.
        """
        if self.is_alive:
            raise WrongStateError(state="running", event="start")
        self.shutdown()  # what is left of one that has died
        read_fd, self._lifeline_fd = os.pipe()
        self._owner_pid = os.getpid()
        _lifelines.add(self._lifeline_fd)
        command = [sys.executable, "-m", "tdserve.server.server_process", str(read_fd)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[read_fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=self.config.build_child_environment(),
                start_new_session=True,  # Ctrl-C is the owner's: it shuts the server down in its own order
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(read_fd)
        try:
            self._address = self._await_ready(self._process, timeout_s)
        except BaseException:
            self.shutdown(timeout_s=2.0)
            raise
        return self

    def client(self, **arguments: Any) -> Client:
        """Returns a new client of this server; arguments as in ``tdserve.connect``."""
        return tdserve.connect(self.address, **arguments)  # imports torch, which the owner of a server need not

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Drains and ends the server; kills it when that takes longer. Idempotent."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner_pid:
            return
        self._let_go()
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _let_go(self) -> None:
        _lifelines.discard(self._lifeline_fd)
        os.close(self._lifeline_fd)

    def __enter__(self) -> Server:
        return self if self.is_alive else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _await_ready(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        stdout = cast(TextIO, process.stdout)
        waiting = select.poll()  # select takes no descriptor above 1023
        waiting.register(stdout, select.POLLIN)
        while True:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise DeadlineExceededError(what=f"the start of a server on {self.config.root}", timeout_s=timeout_s)
            line = stdout.readline()
            if line.startswith(READY_PREFIX):
                return line.removeprefix(READY_PREFIX).strip()
            if line.startswith(FAILED_PREFIX):
                failure = json.loads(line.removeprefix(FAILED_PREFIX))
                raise list_error_classes()[failure["error"]](**failure["fields"])
            if not line:
                raise RemoteProtocolError(expected="a server that starts", received=f"exit code {process.wait()}")


_lifelines: set[int] = set()
"""Pipes whose other ends are servers, each of which ends when no process holds ours any more."""


def _drop_lifelines() -> None:
    """Closes the pipes in a fork: the servers are the parent's, and must not live as long as this process."""
    for fd in _lifelines:
        os.close(fd)
    _lifelines.clear()


os.register_at_fork(after_in_child=_drop_lifelines)


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if a server has no such setting."""
    known = [field.name for field in fields(ServerConfig)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            remedy = f"did you mean {' or '.join(f'{each}=' for each in near)}?" if near else f"there are {known}"
            raise InvalidRequestError(argument=name, reason=f"tdserve.Server has no such setting; {remedy}")
