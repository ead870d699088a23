"""A process that has imported what data workers need, and lends copies of itself to the servers of a test run.

``python -m tests.lent.lender DOOR`` is the program. ``lend`` starts it for this process and all that it starts;
``tests.lent.sitecustomize`` is the end of those who borrow.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tdserve.base.config import build_single_threaded_environment
from tdserve.base.machine import die_with_parent
from tests.lent.sitecustomize import DOOR_VARIABLE

_SERVED = "tdserve.worker.fork_server"
_WORLD = ("net", "mnt", "pid", "user", "ipc")


@contextmanager
def lend(folder: Path) -> Iterator[None]:
    """Lets the servers that are started in this block borrow copies. The program imports torch at the first request."""
    door = folder / "lender"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(door))
        listening.listen(128)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno())],
            cwd=Path(__file__).parents[2],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            env=build_single_threaded_environment(),
        )
    before = dict(os.environ)
    os.environ[DOOR_VARIABLE] = str(door)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before.get("PYTHONPATH")]))
    try:
        yield
    finally:
        os.environ.pop(DOOR_VARIABLE)
        os.environ.pop("PYTHONPATH")
        os.environ.update(before)
        process.kill()
        process.wait()


def copy_for(pid: int) -> int:
    """Returns the copy that stands for a borrowing process; the process itself if nothing stands for it."""
    with suppress(KeyError, FileNotFoundError, ValueError):
        return int(Path(f"{os.environ[DOOR_VARIABLE]}.{pid}").read_text())
    return pid


def _serve(door: socket.socket) -> None:
    connection, _ = door.accept()
    main: Any = importlib.import_module(_SERVED).main
    gc.collect()
    gc.freeze()  # a copy need not look at it, nor write to its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        content, fds, _, _ = socket.recv_fds(connection, 1 << 20, 5)
        if content and _lives_here(connection):
            pid = os.fork()
            if not pid:
                door.close()
                _live(main, json.loads(content), fds)
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


def _live(main: Any, order: dict[str, Any], fds: Sequence[int]) -> None:
    """Runs a copy from its beginning to its end. The connection stays open; its end shows that the copy has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["folder"])
        os.umask(order["umask"])
        resource.setrlimit(resource.RLIMIT_NOFILE, order["limits"])
        for standard, fd in enumerate(fds[:3]):
            os.dup2(fd, standard)
            os.close(fd)
        served_fd, life_fd = fds[3:]
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(life_fd, fcntl.F_GETFL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO ends this process when who borrows has died
        main([str(served_fd)])
    finally:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    _serve(socket.socket(fileno=int(sys.argv[1])))
