"""What a workload stands on: a server of its own, a client, the gloo floor's link and a folder; all gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tdserve.base.errors import NotSupportedError
from tdserve.bench.figures import Figure, Scale, Target, make_figure
from tdserve.bench.floor_link import FloorLink
from tdserve.bench.floors import GlooFloors
from tdserve.bench.measure import SUBJECT, Pacing, Task, alternate
from tdserve.bench.options import FULL, QUICK, WIRES, BenchOptions, Wire, WorkloadSizes
from tdserve.client.client import Client, connect
from tdserve.launcher import Server

SHUTDOWN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Stage:
    """What workloads get.

    Attributes:
        client: Connected with the transport under test.
        gloo_client: What the other transports are compared with; the client itself where that is the one under test.
        wire: The transport under test, as the two ends agreed on it: with ``auto`` that is known only now. It decides
            which floors and which targets are meant.
        address: Of the server, for a second client process.
        link: To the gloo floor's process.
        folder: For local memory-mapped tensordicts; on the server's file system.
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
        """Rounds of every task."""
        return self.options.num_rounds

    @property
    def pacing(self) -> Pacing:
        """The length of a round."""
        return Pacing(self.sizes.round_s)

    def measure(
        self,
        workload: str,
        name: str,
        scale: Scale,
        subject: Task,
        floors: Mapping[str, Task] | None = None,
        *,
        targets: Sequence[Target] = (),
        max_rounds: int | None = None,
    ) -> Figure:
        """Runs a subject and its floors in turn and joins what they reached; the arguments are ``make_figure``'s."""
        num_rounds = self.num_rounds if max_rounds is None else min(self.num_rounds, max_rounds)
        series = alternate({**(floors or {}), SUBJECT: subject}, num_rounds)
        return make_figure(workload, name, scale, subject=series.pop(SUBJECT), floors=series, targets=targets)

    @property
    def gloo(self) -> GlooFloors:
        """The gloo floors with the usual pacing."""
        return GlooFloors(self.link, self.pacing)


@contextmanager
def open_stage(options: BenchOptions) -> Iterator[Stage]:
    """Starts everything; at the end, also after an error or Ctrl-C, no process and no file is left.

    Raises:
        TDServeError: The server does not start, or the client has no such transport.
    """
    sizes = QUICK if options.quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="tdserve-bench-", dir=options.parent))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        link = stack.enter_context(closing(FloorLink()))  # its process imports torch while the server starts
        server = Server(folder / "root", host="127.0.0.1", port=0).start()
        stack.callback(server.shutdown, timeout_s=SHUTDOWN_TIMEOUT_S)
        client = stack.enter_context(connect(server.address, transport=options.transport))
        link.connect()
        (folder / "local").mkdir()
        wire = _wire(client)
        gloo_client = client
        if wire != "gloo":
            gloo_client = stack.enter_context(connect(server.address, transport="gloo"))
        yield Stage(client, gloo_client, wire, server.address, link, folder / "local", options, sizes)


def _wire(client: Client) -> Wire:
    name = client.stats()["transport"]
    for known in WIRES:
        if name == known:
            return known
    raise NotSupportedError(feature=f"a benchmark over {name!r}", reason=f"only {' and '.join(WIRES)} have floors")
