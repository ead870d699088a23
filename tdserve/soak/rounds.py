"""A soak: rounds of clients of every kind under kills, each of which is compared with its histories and measured.

A round has stores of its own. When it has ended and its content is checked, they are deleted; what the processes, the
disk and shared memory hold then should be the same after each round. In the first half of the rounds every kind of
process is killed; in the second half only clients are, so that the server's processes live long enough for their memory
to be judged.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import TDServeError
from tdserve.soak.check import Findings, check
from tdserve.soak.killable_client import KillableClient
from tdserve.soak.process_figures import measure_disk, measure_processes
from tdserve.soak.round_stores import RoundStores
from tdserve.soak.server_under_test import VICTIMS, ServerUnderTest, await_state

RECOVERY_S = 150.0
"""Time within which every client continues after a kill: a worker and a client import torch beside busy processes."""

ROUND_S = 90.0
MIN_ROUND_S = 3.0
USUAL_ROUNDS = 20
"""Of a short run; slopes need a few in each half."""

CLIENT_KINDS = ("client", "leaving client")
"""What is killed, or leaves, in both halves."""

KINDS = (*VICTIMS, *CLIENT_KINDS)
"""Killed in the first half, which ends once every kind has been killed."""

MIN_ROUNDS = 2
"""One with kills of every kind, one with kills of clients alone."""

SETTLE_S = 2.0
"""Between the deletion of a round's stores and the measurement: files are deleted and memory is returned afterwards."""

CLIENT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SoakOptions:
    """What a soak does.

    Attributes:
        minutes: How long, without the start.
        root: The server's root, which is kept; None: a temporary one.
        transports: One client of each lives from the beginning to the end, and one more comes and goes, or is killed.
        kill_every_s: Most seconds between two kills, on average; 0: none.
        seed: Decides what is killed in which order. What is under way then is chance.
        num_workers: Data workers of the server.
    """

    minutes: float
    root: Path | None = None
    transports: tuple[TransportName, ...] = ("gloo", "shm", "grpc")
    kill_every_s: float = 15.0
    seed: int = 1
    num_workers: int = 2

    @property
    def round_s(self) -> float:
        """Length of a round, seconds."""
        return min(ROUND_S, max(MIN_ROUND_S, 60 * self.minutes / USUAL_ROUNDS))

    @property
    def pause_s(self) -> float:
        """Mean time between two kills; in a short run less than ``kill_every_s``, for one of each kind in its half."""
        return min(self.kill_every_s, 30 * self.minutes / len(KINDS))


class SeriesPoint(NamedTuple):
    """A figure after one round.

    Attributes:
        is_calm: Whether only clients were killed in the round.
        at_s: Seconds since the begin of the soak.
        value: The figure.
    """

    is_calm: bool
    at_s: float
    value: float


@dataclass
class SoakResult:
    """What a soak has found.

    Attributes:
        findings: Counts, and faults of the content.
        kills: By what was killed.
        series: By role and figure, a point of each round.
        back_s: After each restart of the server, how many seconds after it was ready each client that lived on had an
            answer again.
        num_rounds: Number of rounds that were ended and checked.
    """

    findings: Findings = field(default_factory=Findings)
    kills: Counter[str] = field(default_factory=Counter)
    series: dict[tuple[str, str], list[SeriesPoint]] = field(default_factory=dict)
    back_s: list[float] = field(default_factory=list)
    num_rounds: int = 0

    def get_last_memory(self, role: str) -> int:
        """Returns the memory of a role after the last round; 0 if it was not there."""
        series = self.series.get((role, "memory"))
        return int(series[-1].value) if series else 0


class Soak:
    """Runs a soak. Threads: one.

    Args:
        options: What it does.
        report: Gets a line about each step.
    """

    def __init__(self, options: SoakOptions, report: Callable[[str], None]) -> None:
        self._options = options
        self._report = report
        self._chance = random.Random(options.seed)
        self._result = SoakResult()
        self._num_clients = 0
        self._begin_s = 0.0
        self._victims: list[str] = []
        self._is_calm_plan = False
        self._num_calm_rounds = 0
        self._next_kill_s = math.inf

    def run(self) -> SoakResult:
        """Runs all rounds. A round that a fault ends is the last.

        Raises:
            TDServeError: The server could not be started.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tdserve-soak-")))
            root = self._options.root or folder / "root"
            self._server = ServerUnderTest(root, num_workers=self._options.num_workers)
            self._server.start()
            stack.callback(self._server.shutdown)
            self._clients = [self._start_client(place) for place in range(2 * len(self._options.transports))]
            stack.callback(self._end_clients)
            self._begin_s = time.monotonic()
            self._plan_kill()
            while not self._is_over:
                histories = folder / "histories"
                try:
                    self._run_round(histories, f"soak-{self._result.num_rounds}-", is_calm=self._is_calm)
                except TDServeError as error:
                    self._result.findings.faults.append(f"{type(error).__name__}: {error}")
                if self._result.findings.faults:
                    kept = shutil.copytree(
                        histories, tempfile.mkdtemp(prefix="tdserve-soak-faults-"), dirs_exist_ok=True
                    )
                    self._report(f"the histories of the round with faults are kept in {kept}")
                    break
                shutil.rmtree(histories)
        return self._result

    def _start_client(self, place: int) -> KillableClient:
        """Starts a client in one of the places; those of the first half live on."""
        self._num_clients += 1
        transports = self._options.transports
        return KillableClient(
            self._server.address,
            transports[place % len(transports)],
            number=self._num_clients,
            place=place,
            num_places=2 * len(transports),
        )

    def _end_clients(self) -> None:
        for client in self._clients:
            client.close()

    @property
    def _elapsed_share(self) -> float:
        """The share of the time that is over; 1.0 and more at the end."""
        return (time.monotonic() - self._begin_s) / (60 * self._options.minutes)

    @property
    def _is_over(self) -> bool:
        return self._elapsed_share >= 1.0 and self._num_calm_rounds >= MIN_ROUNDS // 2

    @property
    def _is_calm(self) -> bool:
        """Whether only clients are killed."""
        has_killed_all = not self._options.kill_every_s or all(self._result.kills[kind] for kind in KINDS)
        return self._elapsed_share >= 0.5 and self._result.num_rounds >= MIN_ROUNDS // 2 and has_killed_all

    @property
    def _residents(self) -> list[KillableClient]:
        return self._clients[: len(self._options.transports)]

    @contextmanager
    def _connect(self) -> Iterator[tdserve.Client]:
        with tdserve.connect(self._server.address, transport="shm", timeout_s=CLIENT_TIMEOUT_S) as client:
            yield client

    def _run_round(self, folder: Path, prefix: str, *, is_calm: bool) -> None:
        folder.mkdir()
        with self._connect() as client:
            RoundStores(client, prefix).create()
        for each in self._clients:
            each.begin(prefix, folder)
        self._await_answers(folder)
        end_s = time.monotonic() + self._options.round_s
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(max(min(self._next_kill_s - time.monotonic(), left_s), 0.0))
            if time.monotonic() >= self._next_kill_s:
                self._disturb(folder, prefix, is_calm=is_calm)
                self._plan_kill()
        for each in self._clients:
            each.request_end()
        for each in self._clients:
            each.await_end()
        with self._connect() as client:
            stores = RoundStores(client, prefix)
            self._result.findings.add(check(stores, folder))
            for name in stores.list_names():
                client.delete(name)
        self._result.num_rounds += 1
        self._num_calm_rounds += is_calm
        self._measure_at_rest(is_calm=is_calm)

    def _plan_kill(self) -> None:
        """Chooses when the next kill is, which may be in a later round: a round may be shorter than the pause."""
        if self._options.kill_every_s:
            self._next_kill_s = time.monotonic() + self._options.pause_s * self._chance.uniform(0.5, 1.5)

    def _disturb(self, folder: Path, prefix: str, *, is_calm: bool) -> None:
        """Kills something, waits until all clients work again, and notes how long that took."""
        if not self._victims or is_calm != self._is_calm_plan:
            kinds = CLIENT_KINDS if is_calm else KINDS
            self._victims, self._is_calm_plan = self._chance.sample(kinds, len(kinds)), is_calm
        victim = self._victims.pop()
        self._result.kills[victim] += 1
        if victim in VICTIMS:
            if self._server.kill(victim, self._chance):
                before = _read_sizes(folder)
                self._server.start()
                self._result.back_s += self._measure_returns(folder, before)
        else:
            place = self._chance.randrange(len(self._residents), len(self._clients))
            self._replace(place, is_killed=victim == "client")
            self._clients[place].begin(prefix, folder)
        self._await_answers(folder)

    def _replace(self, place: int, *, is_killed: bool) -> None:
        client = self._clients[place]
        if is_killed:
            client.kill()
        else:
            client.request_end()
            client.await_end()
            client.close()
        self._clients[place] = self._start_client(place)

    def _measure_returns(self, folder: Path, before: dict[str, int]) -> list[float]:
        """Waits until each client that has worked before has an answer; returns the seconds that each took."""
        waiting = {each.number for each in self._residents}
        begin_s, found = time.monotonic(), []

        def look() -> bool:
            sizes = _read_sizes(folder)
            for number in list(waiting):
                name = f"extend-asked-{number:05d}.jsonl"
                if sizes.get(name, 0) > before.get(name, 0):
                    waiting.discard(number)
                    found.append(time.monotonic() - begin_s)
            return not waiting

        await_state(look, f"an answer to clients {sorted(waiting)}", timeout_s=RECOVERY_S)
        return found

    def _await_answers(self, folder: Path) -> None:
        """Waits until each client has made progress."""
        before = _read_sizes(folder)
        names = [f"{role}-{each.number:05d}.jsonl" for each in self._clients for role in ("extend-asked", "overwrite")]

        def look() -> bool:
            if any(folder.glob("fault-*.txt")):
                return True
            sizes = _read_sizes(folder)
            return all(sizes.get(name, 0) > before.get(name, 0) for name in names)

        await_state(look, "progress of all clients", timeout_s=RECOVERY_S)

    def _measure_at_rest(self, *, is_calm: bool) -> None:
        """Measures, when all stores of the round are deleted and the clients are idle."""
        time.sleep(min(SETTLE_S, self._options.round_s / 4))
        at_s = time.monotonic() - self._begin_s

        def note(role: str, figure: str, value: float) -> None:
            self._result.series.setdefault((role, figure), []).append(SeriesPoint(is_calm, at_s, value))

        roles = {f"client, {each.transport}": [each.pid] for each in self._residents}
        roles |= self._server.find_processes()
        shared = 0
        for role, pids in roles.items():
            figures = measure_processes(pids)
            if figures is None:
                continue
            shared += figures.shared_nbytes
            note(role, "memory", figures.memory_nbytes)
            note(role, "of it anonymous", figures.anonymous_nbytes)
            note(role, "descriptors", figures.num_descriptors)
            note(role, "threads", figures.num_threads)
        note("all", "shared memory", shared)
        disk, num_files = measure_disk(self._server.root)
        note("root", "disk", disk)
        note("root", "files", num_files)
        result = self._result
        self._report(
            f"{at_s / 60:.1f} of {self._options.minutes:g} min: {result.num_rounds} rounds, "
            f"{result.kills.total()} kills, {len(result.findings.faults)} faults, disk {disk >> 20} MiB, "
            f"control {result.get_last_memory('control') >> 20} MiB, "
            f"workers {result.get_last_memory('worker') >> 20} MiB"
        )


def _read_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.jsonl")}
