"""Random requests to a real server: each must be refused properly or carried out, and other clients go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import tdserve
from tdserve.v1 import control_pb2
from tests.fuzz.hostile_session import UNANSWERED, HostileSession
from tests.fuzz.inputs import Inputs
from tests.fuzz.requests import STORES, list_blobs, make_requests, make_rows, make_stores
from tests.integration.logged_server import LoggedServer
from tests.roots import make_quick_root

OPTIONS = ("--memory-limit", "64M", "--transfer-timeout", "3", "--log-level", "warning")

PER_SESSION = 40
"""Requests of one session: many sessions end early."""

ANSWER_S = 5.0
"""Time for all answers of a session, of which some wait for a store or a key."""

VICTIM_S = 10.0
"""Time for a call of another client, on a machine that does much else."""

_NAMES = (*STORES, "made", "x", "n", "y", "text", "k", "c", "g", "m")


class RequestCampaign:
    """A server, a client that it serves, and hostile sessions one after the other.

    Args:
        seed: Decides all requests.

    Attributes:
        codes: The answers by error and code.
    """

    def __init__(self, seed: int) -> None:
        self._inputs = Inputs(seed, names=_NAMES, blobs=list_blobs())
        self._seeds = make_requests()
        self._faults: list[str] = []
        self.codes: Counter[str] = Counter()
        self._open = ExitStack()

    def __enter__(self) -> RequestCampaign:
        root = self._open.enter_context(make_quick_root())
        folder = self._open.enter_context(TemporaryDirectory(prefix="tdserve-fuzz-"))
        self.server = LoggedServer(str(root), Path(folder, "log"), *OPTIONS)
        self._open.callback(self.server.close)
        self._client = self._open.enter_context(tdserve.connect(self.server.address, transport="gloo", timeout_s=60.0))
        self._victim = self._client.create_replay("victim", make_rows()[0], 100)
        self._num_restarts = self._count_restarts()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, num_requests: int) -> None:
        """Sends so many requests."""
        for _ in range(-(-num_requests // PER_SESSION)):
            self._run_session()

    def list_faults(self) -> list[str]:
        """Returns what was no proper answer, and what the server's log has of faults."""
        logged = [line[:400] for line in self.server.lines() if " ERROR " in line or "Traceback" in line]
        restarts = self._count_restarts() - self._num_restarts
        return [*self._faults, *logged, *([f"a data worker was restarted {restarts} times"] if restarts else [])]

    def describe(self) -> Iterator[str]:
        """Yields lines about the answers and faults."""
        yield from (f"{count:8,} {name}" for name, count in self.codes.most_common())
        yield from self.list_faults()

    def _count_restarts(self) -> int:
        return sum(int(worker["num_restarts"]) for worker in self._client.stats()["workers"])

    def _run_session(self) -> None:
        make_stores(self._client)
        session = HostileSession(self.server.address)
        asked = {}
        for number in range(1, PER_SESSION + 1):
            message = self._make_request(number)
            if message.WhichOneof("body") not in UNANSWERED:
                asked[number] = message
            session.send(message)
        for number, error in session.collect(set(asked), ANSWER_S).items():
            self.codes["ok" if error is None else f"{type(error).__name__} {error.code}"] += 1
            if error is not None and error.code in ("INTERNAL", "UNKNOWN"):
                self._faults.append(f"{error} answers {str(asked[number])[:800]}")
        session.close()
        begun_s = time.monotonic()
        self._victim.extend(make_rows())
        self._victim.sample(3)
        if time.monotonic() - begun_s > VICTIM_S:
            self._faults.append("another client's calls took too long")

    def _make_request(self, number: int) -> control_pb2.ClientMessage:
        rng, message = self._inputs.rng, control_pb2.ClientMessage()
        if rng.random() < 0.3:
            self._inputs.fill(message)
        else:
            message.CopyFrom(rng.choice(self._seeds))
            self._inputs.change(message)
        message.request = number
        if rng.random() < 0.9:
            message.channel = 0
        return message
