"""A campaign: clients of every kind work, one process after another is killed, and the final content is compared with
the histories.

``python -m tests.campaign.campaign --kills 200 --seed 1 --servers 3`` prints its counts, and ends with 1 when
anything was lost, doubled or torn. The same seed kills in the same order; what is under way at each kill is chance,
which is the point.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import check_transport
from tests.campaign.check import Report, check
from tests.campaign.stores import KEYS, NUM_SLOTS, SLOTS, make_slots, open_queue, open_tables
from tests.lent.lender import copy_for
from tests.processes import (
    REPOSITORY,
    all_below,
    fork_servers_of,
    is_gone,
    quiet_port,
    wait_for,
    workers_of,
)

VICTIMS = ("control", "worker", "fork server", "client", "server")
"""What is killed. With three servers a process that moves stores between them is killed too."""

MOVER = "mover"

TRANSPORTS = ("gloo", "shm", "gloo", "shm")
"""Transports of the clients that work at the same time."""

RECOVERY_S = 150.0
"""Time within which every client continues after a kill: a worker and a client import torch beside seven busy processes
on two cores."""


class Campaign:
    """A server, or several as one, and their clients.

    Args:
        folder: An empty folder.
        seed: Decides the order of kills.
        num_servers: Several share the tables and the queue.
    """

    def __init__(self, folder: Path, *, seed: int, num_servers: int = 1) -> None:
        self._random = random.Random(seed)
        self._histories = folder / "histories"
        self._histories.mkdir()
        self._servers = [
            tdserve.Server(folder / f"root{number}", port=quiet_port(), num_workers=2, log_level="error")
            for number in range(num_servers)
        ]
        self._clients: list[subprocess.Popen[str]] = []
        self._num_clients = 0
        self._mover: subprocess.Popen[str] | None = None
        self._victims = (*VICTIMS, MOVER) if num_servers > 2 else VICTIMS
        self.kills: Counter[str] = Counter()

    def run(self, num_kills: int) -> Report:
        """Makes this many kills, lets the clients end, restarts the server once more and compares."""
        try:
            for server in self._servers:
                server.start()
            with tdserve.connect(self._address, transport="gloo") as client:
                open_tables(client)
                open_queue(client)
                client.memmap(make_slots(0, NUM_SLOTS), SLOTS)
                client.memmap(TensorDict({"x": torch.zeros(3)}, [3]), KEYS)
            self._clients = [self._start_client(place) for place in range(len(TRANSPORTS))]
            if MOVER in self._victims:
                self._mover = self._start_mover()
            self._await_progress()
            for number in range(num_kills):
                if number % len(self._victims) == 0:
                    order = self._random.sample(self._victims, len(self._victims))
                self._kill(order[number % len(self._victims)])
                self._await_progress()
            for process in self._list_processes():
                process.communicate(timeout=RECOVERY_S)
            for server in self._servers:
                server.shutdown()
                server.start()
            with tdserve.connect(self._address, transport=check_transport(self._random.choice(TRANSPORTS))) as client:
                report = check(client, self._histories)
                report.counts.update(self._count_moves())
                return report
        finally:
            for process in self._list_processes():
                _end(process)
            for server in self._servers:
                server.shutdown()

    @property
    def _address(self) -> str:
        return ",".join(server.address for server in self._servers)

    def _start_client(self, place: int) -> subprocess.Popen[str]:
        """Starts a client in one of the places. The clients of a place follow one another and alternate between
        transports."""
        self._num_clients += 1
        transport = TRANSPORTS[(place + self._num_clients) % len(TRANSPORTS)]
        arguments = [self._address, transport, self._histories, self._num_clients, place * NUM_SLOTS // 4]
        return _start("tests.campaign.client", *arguments)

    def _start_mover(self) -> subprocess.Popen[str]:
        return _start("tests.campaign.mover", self._address, self._moves, self.kills[MOVER])

    @property
    def _moves(self) -> Path:
        return self._histories / "moves.txt"

    def _count_moves(self) -> Counter[str]:
        if self._mover is None:
            return Counter()
        moves = [json.loads(line) for line in self._moves.read_text().splitlines()]
        return Counter(f"moves: {each['outcome'].partition(':')[0] or 'already there'}" for each in moves)

    def _list_processes(self) -> list[subprocess.Popen[str]]:
        return [*self._clients, *([] if self._mover is None else [self._mover])]

    def _kill(self, victim: str) -> None:
        self.kills[victim] += 1
        if victim == "client":
            place = self._random.randrange(len(self._clients))
            os.kill(copy_for(self._clients[place].pid), signal.SIGKILL)
            _end(self._clients[place])
            self._clients[place] = self._start_client(place)
            return
        if victim == MOVER and self._mover is not None:
            os.kill(copy_for(self._mover.pid), signal.SIGKILL)
            _end(self._mover)
            self._mover = self._start_mover()
            return
        server = self._random.choice(self._servers)
        find = {"worker": workers_of, "fork server": fork_servers_of}.get(victim)
        if find is not None and (found := find(server.pid)):
            os.kill(self._random.choice(found), signal.SIGKILL)
            return
        below = all_below(server.pid)
        for pid in [server.pid, *(below if victim == "server" else ())]:
            with suppress(ProcessLookupError):  # dies with its parent
                os.kill(pid, signal.SIGKILL)
        # waits until control can be reaped: its first thread may end before the others
        wait_for(lambda: not server.is_alive and all(map(is_gone, below)), "the end of the server")
        server.start()

    def _await_progress(self) -> None:
        """Waits until every thread of every client has made progress since, and for a random moment more."""
        before = self._sizes()
        wait_for(lambda: self._have_grown(before), "progress of all clients", timeout_s=RECOVERY_S)
        before, num_bytes = self._sizes(), self._random.randint(1, 30_000)
        wait_for(lambda: sum(self._sizes().values()) > sum(before.values()) + num_bytes, "more", timeout_s=RECOVERY_S)

    def _sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._histories.glob("*.jsonl")}

    def _have_grown(self, before: dict[str, int]) -> bool:
        for fault in self._histories.glob("fault-*.txt"):
            raise AssertionError(f"{fault.name}: {fault.read_text()}")
        now = self._sizes()
        newest = range(1, self._num_clients + 1)
        living = {number for number in newest if any(f"-{number:05d}." in name for name in now)}
        return len(living) == self._num_clients and all(
            sum(size - before.get(name, 0) for name, size in now.items() if f"{role}-" in name) > 0
            for role in (
                "extend-claimed",
                "extend-asked",
                "extend-chats",
                "overwrite",
                "alter",
                "publish",
                "create",
                "produce",
            )
        )


def _start(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a process that ends when its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lent.program", module, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a client if it has not ended."""
    process.kill()
    with process:  # closes its pipes
        process.wait()


def main() -> int:
    """Runs a campaign in a temporary folder. Returns 1 if there was a fault; then the folder stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tdserve-campaign-"))
    campaign = Campaign(folder, seed=arguments.seed, num_servers=arguments.servers)
    report = campaign.run(arguments.kills)
    print("kills:", dict(campaign.kills))
    for name, count in sorted(report.counts.items()):
        print(f"{name}: {count:,}")
    print("faults:", len(report.faults))
    for fault in report.faults[:20]:
        print(" ", fault)
    if report.faults:
        print("left for a look:", folder)
        return 1
    subprocess.run(["rm", "-r", str(folder)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
