"""A campaign: clients of every kind work, one process after another is killed, and the final content is compared with
the histories.

``python -m tests.campaign.campaign --kills 200 --seed 1 --servers 3`` prints its counts, and ends with 1 when
anything was lost, doubled or torn, or samples do not have their distribution afterwards. With ``--tls`` all content
but that of local clients takes gRPC, encrypted. With ``--every 3`` something is killed three seconds after the last
victim was started again, whether or not the clients have gone on since: ``--every 3 --minutes 10 --victims server
--servers 3`` kills whole servers for ten minutes. The same seed kills in the same order; what is under way at each kill
is chance, which is the point.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event

import tdserve
from tdserve.base.config import ClientConfig, TransportName
from tdserve.cli.serving.certs import make_authority, make_certificate
from tdserve.soak.activities import ACTIVITIES
from tdserve.soak.check import Findings, check
from tdserve.soak.killable_client import KillableClient
from tdserve.soak.round_stores import RoundStores
from tests.campaign.distribution import check_distribution
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
"""What is killed, unless less is asked for. With three servers a process that moves stores between them is killed
too."""

MOVER = "mover"

TRANSPORTS: tuple[TransportName, ...] = ("gloo", "shm", "gloo", "shm")
"""Transports of the clients that work at the same time."""

TLS_TRANSPORTS: tuple[TransportName, ...] = ("grpc", "shm", "grpc", "shm")

TOKEN = "of-the-campaign"

PROGRAM = (sys.executable, "-m", "tests.lent.program")
"""What runs a module of the campaign."""

MAY_WAIT = ("follow", "consume", "sample")
"""Activities that may find nothing for a while."""

RECOVERY_S = 150.0
"""Time within which every client continues after a kill: a worker and a client import torch beside seven busy processes
on two cores."""


class Campaign:
    """A server, or several as one, and their clients.

    Args:
        folder: An empty folder.
        seed: Decides the order of kills.
        num_servers: Several share the tables and the queue.
        has_tls: Whether all connections are encrypted.
        every_s: Seconds from the return of a victim to the next kill; None: as soon as all clients have gone on.
        victims: What is killed; (): everything.
        num_clients: Clients that work at the same time, up to four.

    Attributes:
        kills: By what was killed.
        kills_s: When, by ``time.monotonic``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        num_servers: int = 1,
        has_tls: bool = False,
        every_s: float | None = None,
        victims: Sequence[str] = (),
        num_clients: int = 4,
    ) -> None:
        self._random = random.Random(seed)
        self._histories = folder / "histories"
        self._histories.mkdir()
        settings, self._environment = _make_certificates(folder) if has_tls else ({}, dict(os.environ))
        self._transports = (TLS_TRANSPORTS if has_tls else TRANSPORTS)[:num_clients]
        self._servers = [
            tdserve.Server(folder / f"root{number}", port=quiet_port(), num_workers=2, log_level="error", **settings)
            for number in range(num_servers)
        ]
        self._unharmed: list[tdserve.Server] = []
        self._clients: list[KillableClient] = []
        self._num_clients = 0
        self._mover: subprocess.Popen[str] | None = None
        self._has_mover = num_servers > 2
        self._victims = victims or ((*VICTIMS, MOVER) if self._has_mover else VICTIMS)
        self._every_s = every_s
        self.kills: Counter[str] = Counter()
        self.kills_s: list[float] = []

    def run(self, num_kills: int, minutes: float = math.inf) -> Findings:
        """Makes this many kills, or as many as so many minutes allow, lets the clients end, restarts the servers once
        more and compares."""
        try:
            for server in self._servers:
                server.start()
            with self._connect(self._transports[0]) as client:
                RoundStores(client).create()
            self._clients = [self._start_client(place) for place in range(len(self._transports))]
            if self._has_mover:
                self._mover = self._start_mover()
            self._await_progress()
            self._kill_on(num_kills, minutes)
            self._await_progress()
            for client_process in self._clients:
                client_process.close()
            if self._mover is not None:
                self._mover.communicate(timeout=RECOVERY_S)
            for server in self._servers:
                server.shutdown()
                server.start()
            with self._connect(self._random.choice(self._transports)) as client:
                wait_for(lambda: not client.stats().get("lost"), "answers of all servers", timeout_s=60.0)
                report = check(RoundStores(client), self._histories)
                check_distribution(RoundStores(client), report)
                report.counts.update(self._count_moves())
                return report
        finally:
            for client_process in self._clients:
                client_process.kill()
            if self._mover is not None:
                _end(self._mover)
            for server in self._servers:
                server.shutdown()

    def _kill_on(self, num_kills: int, minutes: float) -> None:
        end_s, order = time.monotonic() + 60.0 * minutes, list[str]()
        while self.kills.total() < num_kills and time.monotonic() < end_s:
            if self._every_s is not None:
                Event().wait(self._every_s)
            elif self.kills:
                self._await_progress()
            order = order or self._random.sample(self._victims, len(self._victims))
            self._kill(order.pop(0))

    @property
    def _address(self) -> str:
        return ",".join(server.address for server in self._servers)

    def _connect(self, transport: TransportName) -> tdserve.Client:
        settings = ClientConfig.from_env(self._environment)
        tls, token = settings.find_tls(), settings.token
        return tdserve.connect(self._address, transport=transport, token=token, tls=tls)

    def _start_client(self, place: int) -> KillableClient:
        """Starts a client in one of the places. The clients of a place follow one another and alternate between
        transports."""
        self._num_clients += 1
        client = KillableClient(
            self._address,
            self._transports[(place + self._num_clients) % len(self._transports)],
            number=self._num_clients,
            place=place,
            num_places=len(self._transports),
            program=PROGRAM,
            environment=self._environment,
        )
        client.begin("", self._histories)
        return client

    def _start_mover(self) -> subprocess.Popen[str]:
        """Starts a process that ends when its standard input closes."""
        arguments = ["tests.campaign.mover", self._address, str(self._moves), str(self.kills[MOVER])]
        return subprocess.Popen(
            [*PROGRAM, *arguments], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def _moves(self) -> Path:
        return self._histories / "moves.txt"

    def _count_moves(self) -> Counter[str]:
        if self._mover is None:
            return Counter()
        moves = [json.loads(line) for line in self._moves.read_text().splitlines()]
        return Counter(f"moves: {each['outcome'].partition(':')[0] or 'already there'}" for each in moves)

    def _kill(self, victim: str) -> None:
        self.kills[victim] += 1
        self.kills_s.append(time.monotonic())
        if victim == "client":
            place = self._random.randrange(len(self._clients))
            os.kill(copy_for(self._clients[place].pid), signal.SIGKILL)
            self._clients[place].kill()
            self._clients[place] = self._start_client(place)
            return
        if victim == MOVER and self._mover is not None:
            os.kill(copy_for(self._mover.pid), signal.SIGKILL)
            _end(self._mover)
            self._mover = self._start_mover()
            return
        server = self._choose_server()
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

    def _choose_server(self) -> tdserve.Server:
        """Returns a server; all come equally often. Clients could not come back to a server that is killed again and
        again."""
        self._unharmed = self._unharmed or self._random.sample(self._servers, len(self._servers))
        return self._unharmed.pop()

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
        # A client that was killed while it started has no history.
        have_begun = (any(f"-{client.number:05d}." in name for name in now) for client in self._clients)
        return all(have_begun) and all(
            sum(size - before.get(name, 0) for name, size in now.items() if f"{role}-" in name) > 0
            for role in ACTIVITIES
            if role not in MAY_WAIT
        )


def _make_certificates(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Makes certificates and a token; returns the settings of servers and the environment of clients."""
    make_authority(folder, 2)
    make_certificate(folder, "server", ["localhost", "127.0.0.1"], 2)
    (folder / "token").write_text(TOKEN)
    settings = {"tls_cert": "server.pem", "tls_key": "server.key", "token_file": "token"}
    variables = {"TDSERVE_TOKEN": TOKEN, "TDSERVE_TLS_CA": str(folder / "ca.pem")}
    return {name: str(folder / file) for name, file in settings.items()}, {**os.environ, **variables}


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a process if it has not ended."""
    process.kill()
    with process:  # closes its pipes
        process.wait()


def main() -> int:
    """Runs a campaign in a temporary folder. Returns 1 if there was a fault; then the folder stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--victims", nargs="+", choices=(*VICTIMS, MOVER), default=(), metavar="VICTIM")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--every", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tdserve-campaign-"))
    campaign = Campaign(
        folder,
        seed=arguments.seed,
        num_servers=arguments.servers,
        has_tls=arguments.tls,
        every_s=arguments.every,
        victims=arguments.victims,
        num_clients=arguments.clients,
    )
    num_kills = arguments.kills or (200 if math.isinf(arguments.minutes) else sys.maxsize)
    report = campaign.run(num_kills, arguments.minutes)
    print("kills:", dict(campaign.kills))
    pauses_s = [after_s - before_s for before_s, after_s in pairwise(campaign.kills_s)]
    if pauses_s:
        print(f"seconds from kill to kill: {min(pauses_s):.1f} to {max(pauses_s):.1f}, median {median(pauses_s):.1f}")
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
