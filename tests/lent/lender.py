"""Processes that have imported what data workers need, or children of the benchmark, or clients, and lend copies of
themselves to the servers of a test run, to the benchmark, or to tests that start programs or spawn processes.

``python -m tests.lent.lender MODULE DOOR`` is the program. ``lend`` starts it for this process and all that it starts;
``tests.lent.sitecustomize`` is the end of those who borrow, ``tests.lent.servers`` that of those who start a server.
"""

from __future__ import annotations

import ast
import fcntl
import gc
import importlib
import os
import pkgutil
import resource
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tdserve.base import failpoints
from tdserve.base.config import build_single_threaded_environment
from tdserve.base.machine import die_with_parent
from tests.lent.servers import SERVER_MODULE, SHELL_MODULE
from tests.lent.sitecustomize import DOOR_VARIABLE, LENT_MODULES, PROGRAM_MODULE, SPAWNED_MODULE, read_start

_ENTRIES = {
    **{module: f"{module}:main" for module in (*LENT_MODULES, SERVER_MODULE, SHELL_MODULE)},
    "tdserve.bench.child": "tdserve.bench.child:run_child",
    "tdserve.observer": "tdserve.observer.__main__:main",
}
"""The function that a copy calls for each module, with the arguments if there are any."""

MAX_FDS = 64
"""Descriptors that a borrower may have: the standard ones, those that it has inherited, and that of its life."""

_OUT_OF_THE_WAY = 512
"""Descriptors from here on have numbers that no borrower has inherited."""

_PREPARED = {
    "tdserve.bench.child": ("tdserve.bench.runs", "tdserve.bench.floor_link", "tdserve.bench.workloads"),
    "tdserve.worker.fork_server": ("tdserve.worker.data_worker",),
    SERVER_MODULE: ("tdserve.server.serving",),
    SHELL_MODULE: ("tdserve.cli.serving.serve", SERVER_MODULE, "tdserve.server.serving"),
}
"""What modules import only once they are told what to do."""

_WORLD = ("net", "mnt", "pid", "user", "ipc")


@contextmanager
def lend(folder: Path) -> Iterator[None]:
    """Lets what is started in this block borrow copies. A program imports torch at its first request."""
    lenders = [_start(folder, module) for module in _ENTRIES]
    before = dict(os.environ)
    os.environ[DOOR_VARIABLE] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before.get("PYTHONPATH")]))
    try:
        yield
    finally:
        os.environ.pop(DOOR_VARIABLE)
        os.environ.pop("PYTHONPATH")
        os.environ.update(before)
        for lender in lenders:
            lender.kill()
            lender.wait()


def _start(folder: Path, module: str) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / module))
        listening.listen(128)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, module, str(listening.fileno())],
            cwd=Path(__file__).parents[2],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            env=None if module in (PROGRAM_MODULE, SPAWNED_MODULE) else build_single_threaded_environment(),
        )


def copy_for(pid: int) -> int:
    """Returns the copy that stands for a borrowing process; the process itself if nothing stands for it."""
    with suppress(KeyError, FileNotFoundError, ProcessLookupError, ValueError):
        copy, start = Path(os.environ[DOOR_VARIABLE], str(pid)).read_bytes().split()
        if start == read_start(pid):  # otherwise of an earlier process, which was killed and could not remove the note
            return int(copy)
    return pid


def _serve(module: str, door: socket.socket) -> None:
    connection, _ = door.accept()
    run = pkgutil.resolve_name(_ENTRIES[module])
    for name in _PREPARED.get(module, ()):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a copy need not look at it, nor write to its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        content, fds, _, _ = socket.recv_fds(connection, 1 << 20, MAX_FDS)
        if content and _lives_here(connection):
            pid = os.fork()
            if not pid:
                door.close()
                _live(run, ast.literal_eval(content.decode()), fds, connection)
            with suppress(BrokenPipeError):
                connection.send(str(pid).encode())
        for fd in fds:
            os.close(fd)
        connection.close()
        connection, _ = door.accept()


def _lives_here(connection: socket.socket) -> bool:
    """Returns whether a borrower sees the same network, files and processes as this process, and is of the same
    user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    try:
        same = all(os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}") for name in _WORLD)
    except OSError:
        return False
    return same and uid == os.getuid()


def _move(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    os.close(fd)
    return moved


def _live(run: Any, order: dict[str, Any], fds: Sequence[int], connection: socket.socket) -> None:
    """Runs a copy from its beginning to its end. The connection stays open: it brings the status with which the copy
    returns, and its end shows that the copy has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = socket.socket(fileno=_move(connection.detach()))
    status = 1
    try:
        os.environ.clear()
        os.environ.update(order["environ"])
        failpoints.arm()  # of this environment
        os.chdir(order["folder"])
        os.umask(order["umask"])
        if order["starts_session"]:
            os.setsid()
        numbers = [0, 1, 2, *order["fds"]]
        moved_fds = list(map(_move, fds))
        for fd, number in zip(moved_fds, numbers, strict=False):
            os.dup2(fd, number)
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, order["limits"])
        for life_fd in moved_fds[len(numbers) :]:
            fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
            flags = fcntl.fcntl(life_fd, fcntl.F_GETFL)
            fcntl.fcntl(life_fd, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO ends this process when who borrows has died
        status = run(*filter(None, [order["arguments"]])) or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 (outermost frame)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        with suppress(OSError):
            connection.send(str(status).encode())
        os._exit(status)


if __name__ == "__main__":
    die_with_parent()
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
