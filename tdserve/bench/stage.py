"""What a workload stands on: a server of its own, clients, the link of the gloo floor and a folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from tdserve.base.errors import NotSupportedError
from tdserve.bench.figures import Figure, Scale, make_figure
from tdserve.bench.floor_link import WHOLE, FloorLink
from tdserve.bench.floors import TORCHRL, make_gloo_floor
from tdserve.bench.measure import SUBJECT, Pacing, Series, Task, alternate
from tdserve.bench.options import FULL, QUICK, WIRES, BenchOptions, Wire, WorkloadSizes
from tdserve.bench.targets import find_targets
from tdserve.client.client import Client, connect
from tdserve.client.tables.replay import ReplayHandle
from tdserve.launcher import Server

SHUTDOWN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Stage:
    """What workloads get.

    Attributes:
        client: Connected with the transport under test.
        gloo_client: The client that other transports are compared with; over gloo, ``client`` itself.
        wire: The transport under test, as both ends agreed on it: with ``auto`` that is known only now. It decides
            which floors are measured and which targets are meant.
        address: The server's address, for a second client process.
        link: To the process of the gloo floor.
        folder: For local memory-mapped tensordicts, on the server's file system.
        options: What the run was asked for.
        sizes: How much data.
    """

    client: Client
    gloo_client: Client
    wire: Wire
    address: str
    link: FloorLink
    folder: Path
    options: BenchOptions
    sizes: WorkloadSizes

    @property
    def num_rounds(self) -> int:
        """The number of rounds of every task."""
        return self.options.num_rounds

    @property
    def pacing(self) -> Pacing:
        """The usual length of a round."""
        return Pacing(self.sizes.round_s)

    def make_gloo_floor(self, *, out: int = 0, back: int = 0, message_nbytes: int = WHOLE) -> Task:
        """Returns a floor over the raw link; see ``make_gloo_floor``."""
        return make_gloo_floor(self.link, out=out, back=back, message_nbytes=message_nbytes)

    def measure(
        self,
        workload: str,
        name: str,
        scale: Scale,
        subject: Task,
        floors: Mapping[str, Task] | None = None,
        *,
        pacing: Pacing | None = None,
        max_rounds: int | None = None,
    ) -> Figure:
        """Runs a subject and its floors in turn and returns their figure."""
        num_rounds = self.num_rounds if max_rounds is None else min(self.num_rounds, max_rounds)
        series = alternate({**(floors or {}), SUBJECT: subject}, num_rounds, pacing or self.pacing)
        return self.judge(workload, name, scale, series.pop(SUBJECT), series)

    def judge(
        self, workload: str, name: str, scale: Scale, subject: Series, floors: Mapping[str, Series] | None = None
    ) -> Figure:
        """Joins a subject with its floors and with what the plan asks.

        Without torchrl, the targets that mean it are left out.
        """
        floors = floors or {}
        found = find_targets(self.wire, workload, name)
        kept = [target for target in found if target.floor != TORCHRL or TORCHRL in floors]
        return make_figure(workload, name, scale, subject=subject, floors=floors, targets=kept)

    @contextmanager
    def open_replay(
        self, name: str, like: TensorDictBase, capacity: int, batches: Iterable[TensorDictBase] = (), **options: Any
    ) -> Iterator[ReplayHandle]:
        """Creates a replay, writes the batches into it, and deletes it at the end."""
        replay = self.client.create_replay(name, like=like, capacity=capacity, **options)
        try:
            for batch in batches:
                replay.extend(batch)
            yield replay
        finally:
            self.client.delete(name)


@contextmanager
def open_stage(options: BenchOptions) -> Iterator[Stage]:
    """Starts everything. At the end no process and no file is left, also after an error or Ctrl-C.

    Raises:
        TDServeError: The server does not start, or the client has no such transport.
    """
    folder = Path(tempfile.mkdtemp(prefix="tdserve-bench-", dir=options.parent))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        link = stack.enter_context(closing(FloorLink()))  # its process imports torch while the server starts
        server = Server(folder / "root", host="127.0.0.1", port=0).start()
        stack.callback(server.shutdown, timeout_s=SHUTDOWN_TIMEOUT_S)
        client = stack.enter_context(connect(server.address, transport=options.transport))
        link.connect()
        local = folder / "local"
        local.mkdir()
        wire = _find_wire(client)
        gloo_client = client
        if wire != "gloo":
            gloo_client = stack.enter_context(connect(server.address, transport="gloo"))
        sizes = QUICK if options.quick else FULL
        yield Stage(client, gloo_client, wire, server.address, link, local, options, sizes)


def _find_wire(client: Client) -> Wire:
    name = client.stats()["transport"]
    for known in WIRES:
        if name == known:
            return known
    raise NotSupportedError(feature=f"a benchmark over {name!r}", reason=f"only {' and '.join(WIRES)} have floors")
