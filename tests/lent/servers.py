"""Lends servers to a process of tests that starts them by ``subprocess``.

What a server imports costs half a second, and a run of all tests starts a thousand of them. Unlike other borrowers, who
starts a server gets the copy itself: its process id is that of the server, so a test can stop, kill and examine it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TextIO

from tests.lent.sitecustomize import DOOR_VARIABLE, make_order

SERVER_MODULE = "tdserve.server.server_process"
"""The module of servers that ``tdserve.Server`` starts."""

SHELL_MODULE = "tdserve.__main__"
"""The module of ``tdserve serve``."""

_COMMANDS = {("-m", SERVER_MODULE): SERVER_MODULE, ("-m", "tdserve", "serve"): SHELL_MODULE}

_OPTIONS = {"cwd", "env", "pass_fds", "start_new_session", "stderr", "stdin", "stdout", "text"}
"""Options of a process that a copy can stand for."""


class LendingPopen(subprocess.Popen[Any]):
    """Starts a process; a server is borrowed."""

    def __new__(cls, args: Any, *positional: Any, **options: Any) -> Any:
        folder = (options.get("env") or os.environ).get(DOOR_VARIABLE)
        if folder and not positional and _can_borrow(args, options):
            for words, module in _COMMANDS.items():
                if tuple(args[1 : 1 + len(words)]) == words:
                    return _borrow(folder, module, args, options) or super().__new__(cls)
        return super().__new__(cls)


def _can_borrow(args: Any, options: dict[str, Any]) -> bool:
    return (
        isinstance(args, list)
        and args[0] == sys.executable
        and options.keys() <= _OPTIONS
        and options.get("stdin") in (None, subprocess.DEVNULL)
        and options.get("stderr") not in (subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL)
        and (options.get("stdout") != subprocess.PIPE or options.get("text") is True)
    )


class BorrowedServer:
    """What ``subprocess.Popen`` is of other processes."""

    def __init__(self, args: list[str], pid: int, connection: socket.socket, output: TextIO | None) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = output
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Returns its exit status if it has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit status."""
        if self.returncode is None:
            waiting = select.poll()  # select takes no descriptor above 1023
            waiting.register(self._pidfd, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            status = self._connection.recv(32)
            self.returncode = int(status) if status else -signal.SIGKILL
            self._connection.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> BorrowedServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()

    def __del__(self) -> None:
        if self.returncode is None:
            self._connection.close()
            os.close(self._pidfd)


def _borrow(folder: str, module: str, args: list[str], options: Mapping[str, Any]) -> BorrowedServer | None:
    """Returns a copy that runs as a server; None if there is no lender."""
    fds = options.get("pass_fds", ())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = make_order(
        dict(options.get("env") or os.environ),
        os.fspath(options.get("cwd") or os.getcwd()),
        args[3:],
        list(fds),
        starts_session=options.get("start_new_session", False),
    )
    with ExitStack() as closing:
        stdin = os.open(os.devnull, os.O_RDONLY) if options.get("stdin") == subprocess.DEVNULL else 0
        if stdin:
            closing.callback(os.close, stdin)
        stdout, output = _choose_descriptor(options.get("stdout"), 1), None
        if stdout == subprocess.PIPE:
            reading, stdout = os.pipe()
            closing.callback(os.close, stdout)
            output = os.fdopen(reading, encoding="utf-8")
        stderr = _choose_descriptor(options.get("stderr"), 2)
        try:
            connection.connect(f"{folder}/{module}")
            socket.send_fds(connection, [repr(order).encode()], [stdin, stdout, stderr, *fds])
            pid = int(connection.recv(32) or 0)
        except OSError:
            pid = 0
    if pid:
        return BorrowedServer(args, pid, connection, output)
    if output is not None:
        output.close()
    connection.close()
    return None


def _choose_descriptor(given: Any, otherwise: int) -> int:
    if given is None:
        return otherwise
    return given if isinstance(given, int) else int(given.fileno())
