"""Processes of the tests in this folder: started, watched through /proc, and waited for by their state, never by
time."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from tests.lent.lender import copy_for

if TYPE_CHECKING:
    import tdserve

REPOSITORY = Path(__file__).parents[2]

START_TIMEOUT_S = 60.0
"""A process that imports torch: two seconds alone, many times that beside seven others on two cores."""

MAPPED_IPV4 = "0000000000000000FFFF0000"
"""In front of an IPv4 address on an IPv6 socket: ::ffff:127.0.0.1 is reached over IPv4 only."""

_State = TypeVar("_State")


def wait_for(look: Callable[[], _State | None], what: str, *, timeout_s: float = 30.0) -> _State:
    """The first result of ``look`` that is neither None nor False; fails the test when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = look()
        if state is not None and state is not False:
            return state
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        Event().wait(0.01)


def quiet_port() -> int:
    """A TCP port of loopback that nobody uses, and that the system gives to nobody who asks for any: it can be bound
    again after its server was killed, whatever other tests do meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = max(1024, first - 20_000)
    for port in random.SystemRandom().sample(range(lowest, max(first, lowest + 1_000)), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are in use")


class Program:
    """A module of this folder in a process of its own; it says what it does, line by line, on its output.

    Args:
        arguments: Of the program.
        prefix: A command that runs it, such as ``ip netns exec NAME``.
        module: The program.
    """

    def __init__(
        self, *arguments: object, prefix: tuple[str, ...] = (), module: str = "tests.integration.programs"
    ) -> None:
        command = [*prefix, sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def line(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next line that it prints; ``""`` when it has ended."""
        assert self._process.stdout is not None
        with alarm(timeout_s, f"a line of process {self.pid}"):
            return self._process.stdout.readline().strip()

    def rest(self, *, timeout_s: float = START_TIMEOUT_S) -> list[str]:
        """All further lines, when it has ended."""
        assert self._process.stdout is not None
        with alarm(timeout_s, f"the end of process {self.pid}"):
            return self._process.stdout.read().splitlines()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Returns when it stands still, by SIGSTOP."""
        wait_for(lambda: state_of(self.pid) == "T", f"a stop of process {self.pid}", timeout_s=START_TIMEOUT_S)

    def wait_killed(self) -> None:
        """Returns when SIGKILL has ended it."""
        assert self._process.wait(START_TIMEOUT_S) == -signal.SIGKILL

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def alarm(timeout_s: float, what: str) -> Iterator[None]:
    """Ends a blocking read of this thread, which must be the main one."""

    def ring(number: int, frame: object) -> None:
        raise AssertionError(f"{what} did not come within {timeout_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def state_of(pid: int) -> str | None:
    """R, S, D, T (stopped), Z (ended, not yet reaped); None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return state_of(pid) in (None, "Z", "X")


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that still run; of one that stands for a copy, the copy."""
    found = [copy for copy in [copy_for(pid)] if copy != pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            content = path.read_text()
            if int(content.rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return [child for child in found if not is_gone(child)]


def fork_servers_of(pid: int) -> list[int]:
    """The process that forks the data workers of a server, unless it has just died.

    Args:
        pid: The server's control process.
    """
    return [copy_for(child) for child in children_of(pid) if b"tdserve.worker.fork_server" in _command(child)]


def workers_of(pid: int) -> list[int]:
    """The data workers of a server.

    Args:
        pid: Its control process.
    """
    return [worker for forking in fork_servers_of(pid) for worker in children_of(forking)]


def ready_worker(client: tdserve.Client) -> dict[str, int]:
    """What a server says of its only data worker, when that is up."""

    def look() -> dict[str, int] | None:
        (worker,) = client.stats()["workers"]
        return worker if worker["is_ready"] else None

    return wait_for(look, "a data worker", timeout_s=START_TIMEOUT_S)


def all_below(pid: int) -> list[int]:
    """What a process has started, what that has started, and so on."""
    return [below for child in children_of(pid) for below in (child, *all_below(child))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def num_fds(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to; without those that it closes meanwhile."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


def num_open_below(folder: Path) -> int:
    """Descriptors of this process that lead into a folder: whatever else it opens and closes meanwhile."""
    return sum(file.startswith(f"{folder}/") for file in open_files(os.getpid()))


def listening_addresses(pid: int) -> set[str]:
    """IPv4 addresses, as hexadecimal digits of /proc/net, on which a process accepts TCP connections; IPv6 as it is."""
    return {address.partition(":")[0].removeprefix(MAPPED_IPV4) for address in _listening(pid)}


def listening_ports(pid: int) -> set[int]:
    """Ports on which a process accepts TCP connections."""
    return {int(address.partition(":")[2], 16) for address in _listening(pid)}


def _listening(pid: int) -> set[str]:
    inodes = {file[len("socket:[") : -1] for file in open_files(pid) if file.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    return found


def maps_file(pid: int, inode: int) -> bool:
    """Whether a process maps a file, which may have lost its name."""
    return any(line.split()[4] == str(inode) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
