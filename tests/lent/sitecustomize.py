"""Every Python process of a test run imports this at its start. One that is to fork data workers, to be a client that a
server starts for itself, to work for the benchmark, to run a program of the tests, or that ``multiprocessing`` spawns,
lets a lender do so.

Such a process imports torch for seconds, of which a run would spend a third. A lender (``tests.lent.lender``) has
imported it once, and forks a copy of itself, which works in this process's place; this one lives as long as that copy,
and that copy no longer than this one. Its status is that of a copy that has returned. Where the lender cannot, this
process goes on by itself.
"""

from __future__ import annotations

# What is built in takes a third of the time of ``signal``, ``socket`` and ``json``.
import _signal  # type: ignore[import-not-found]
import ctypes
import os
import sys
from array import array

DOOR_VARIABLE = "TESTS_LENDER"
"""Environment variable with the folder of the lenders' UNIX sockets, each of which has the name of a module."""

PROGRAM_MODULE = "tests.lent.program"
"""The module that runs any program of the tests."""

SPAWNED_MODULE = "tests.lent.spawned"
"""The module that runs what ``multiprocessing`` spawns."""

LENT_MODULES = (
    "tdserve.worker.fork_server",
    "tdserve.schedule",
    "tdserve.observer",
    "tdserve.bench.child",
    PROGRAM_MODULE,
    SPAWNED_MODULE,
)
"""Modules that copies run, each those of a lender of its own: a data worker has imported nothing of a client."""

SPAWN_ARGUMENT = "--multiprocessing-fork"
"""What ``multiprocessing`` appends to the command line of an interpreter that it spawns."""

_PR_SET_PDEATHSIG = 1


def stand_for(folder: str, module: str, arguments: list[str]) -> None:
    """Has a lender run a module, and ends when the copy does. Returns if nothing is lent.

    The copy has the descriptors that this process has inherited, by the same numbers.

    Args:
        folder: Folder of the lenders' sockets.
        module: Name of the module.
        arguments: Its command-line arguments.
    """
    fds = _list_inherited()
    import _socket

    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{folder}/{module}")
        order = make_order(dict(os.environ), os.getcwd(), arguments, fds)
        life_fd, _ = os.pipe()  # the other end stays open as long as this process lives
        rights = array("i", [0, 1, 2, *fds, life_fd])
        connection.sendmsg([repr(order).encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        pid = connection.recv(32)
    except OSError:  # no lender, or not for this user
        return
    if not pid:  # it lives in another world than this process
        return
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    if module == SPAWNED_MODULE:
        pidfd = os.pidfd_open(int(pid))
        _signal.signal(_signal.SIGTERM, lambda number, _: _signal.pidfd_send_signal(pidfd, number))
    else:
        _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _signal.SIGKILL)
    for inherited in (0, 1, *fds, life_fd):
        os.close(inherited)
    with open(f"{folder}/{os.getpid()}", "wb") as note:
        note.write(b"%s %s" % (pid, read_start(os.getpid())))
    status = connection.recv(32)
    os.unlink(f"{folder}/{os.getpid()}")
    if status:
        os._exit(int(status))
    os.kill(os.getpid(), _signal.SIGKILL)


def read_start(pid: int) -> bytes:
    """Returns when a process has started, which distinguishes it from an earlier one of this number."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[19]


def make_order(
    environ: dict[str, str], folder: str, arguments: list[str], fds: list[int], *, starts_session: bool = False
) -> dict[str, object]:
    """Returns what a lender is told of the copy that it is to fork; it has this process's mask and limits.

    Args:
        environ: Its environment.
        folder: Its working directory.
        arguments: Its command-line arguments.
        fds: Numbers of the descriptors above the standard ones that it has.
        starts_session: Whether it leads a session of its own.
    """
    import resource

    umask = os.umask(0)
    os.umask(umask)
    return {
        "environ": environ,
        "folder": folder,
        "umask": umask,
        "arguments": arguments,
        "fds": fds,
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "starts_session": starts_session,
    }


def _list_inherited() -> list[int]:
    """Lists the descriptors above the standard ones that are open."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
        except OSError:  # that of the listing
            continue
    return found


if DOOR_VARIABLE in os.environ:
    if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in LENT_MODULES:
        stand_for(os.environ[DOOR_VARIABLE], sys.orig_argv[2], sys.orig_argv[3:])
    elif sys.orig_argv[-1] == SPAWN_ARGUMENT:
        stand_for(os.environ[DOOR_VARIABLE], SPAWNED_MODULE, sys.orig_argv[-3:])
