"""Starts the processes of these tests and watches them through /proc. Waits look at the state of a process, never at a
clock."""

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
from typing import TYPE_CHECKING, Any, TypeVar

from tests.lent.lender import copy_for

if TYPE_CHECKING:
    import tdserve

REPOSITORY = Path(__file__).parents[1]

START_TIMEOUT_S = 60.0
"""A process that imports torch takes two seconds alone, and many times that beside seven others on two cores."""

MAPPED_IPV4 = "0000000000000000FFFF0000"
"""The prefix of an IPv4 address on an IPv6 socket: ::ffff:127.0.0.1 is reached over IPv4 only."""

_State = TypeVar("_State")


def wait_for(look: Callable[[], _State | None], what: str, *, timeout_s: float = 30.0) -> _State:
    """Returns the first result of ``look`` that is neither None nor False. Fails the test if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = look()
        if state is not None and state is not False:
            return state
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        Event().wait(0.01)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def quiet_port() -> int:
    """Returns a TCP port of loopback that nobody uses and that the system assigns to nobody. A killed server can bind
    it again, whatever other tests do meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = max(1024, first - 20_000)
    for port in random.SystemRandom().sample(range(lowest, max(first, lowest + 1_000)), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are in use")


class Program:
    """A module of this folder in a process of its own. It prints a line for everything that it has done.

    Args:
        arguments: Command-line arguments.
        prefix: A command that runs it, such as ``ip netns exec NAME``.
        module: Name of the module.
    """

    def __init__(
        self, *arguments: object, prefix: tuple[str, ...] = (), module: str = "tests.integration.programs"
    ) -> None:
        command = [*prefix, sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def line(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Returns the next line that it prints; ``""`` if it has ended."""
        assert self._process.stdout is not None
        with alarm(timeout_s, f"a line of process {self.pid}"):
            return self._process.stdout.readline().strip()

    def rest(self, *, timeout_s: float = START_TIMEOUT_S) -> list[str]:
        """Waits for its end and returns all further lines."""
        assert self._process.stdout is not None
        with alarm(timeout_s, f"the end of process {self.pid}"):
            return self._process.stdout.read().splitlines()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Waits until SIGSTOP has stopped it."""
        wait_for(lambda: state_of(self.pid) == "T", f"a stop of process {self.pid}", timeout_s=START_TIMEOUT_S)

    def wait_killed(self) -> None:
        """Waits until SIGKILL has ended it."""
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
    """Interrupts a blocking read of this thread, which must be the main thread."""

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
    """Returns R, S, D, T (stopped) or Z (ended, not yet reaped); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, reaped or not."""
    return state_of(pid) in (None, "Z", "X")


def children_of(pid: int) -> list[int]:
    """Lists the living children of a process. If the process only waits for a copy of itself, these are the copy's."""
    found = [copy for copy in [copy_for(pid)] if copy != pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            content = path.read_text()
            if int(content.rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return [child for child in found if not is_gone(child)]


def fork_servers_of(pid: int) -> list[int]:
    """Returns the process that forks a server's data workers; none if it has just died.

    Args:
        pid: Id of the server's control process.
    """
    return [copy_for(child) for child in children_of(pid) if b"tdserve.worker.fork_server" in _command(child)]


def workers_of(pid: int) -> list[int]:
    """Lists the data workers of a server.

    Args:
        pid: Id of the server's control process.
    """
    return [worker for forking in fork_servers_of(pid) for worker in children_of(forking)]


def ready_worker(client: tdserve.Client) -> dict[str, Any]:
    """Returns what a server reports about its only data worker, once that is ready."""

    def look() -> dict[str, Any] | None:
        (worker,) = client.stats()["workers"]
        return worker if worker["is_ready"] else None

    return wait_for(look, "a data worker", timeout_s=START_TIMEOUT_S)


def all_below(pid: int) -> list[int]:
    """Lists all descendants of a process."""
    return [below for child in children_of(pid) for below in (child, *all_below(child))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def num_fds(pid: int) -> int:
    """Counts the open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    """Counts the threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def open_files(pid: int) -> list[str]:
    """Lists the targets of a process's descriptors, without descriptors that it closes meanwhile."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


def num_open_below(folder: Path) -> int:
    """Counts the descriptors of this process that lead into a folder, whatever else it opens and closes meanwhile."""
    return sum(file.startswith(f"{folder}/") for file in open_files(os.getpid()))


def listening_addresses(pid: int) -> set[str]:
    """Lists the IPv4 addresses on which a process accepts TCP connections, as hexadecimal digits of /proc/net; IPv6
    addresses as they are."""
    return {address.partition(":")[0].removeprefix(MAPPED_IPV4) for address in _listening(pid)}


def listening_ports(pid: int) -> set[int]:
    """Lists the ports on which a process accepts TCP connections."""
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
    """Returns whether a process maps a file, which may have lost its name."""
    return any(line.split()[4] == str(inode) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
