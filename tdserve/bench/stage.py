"""The stage of a workload: a server of its own, a client, the link of the gloo floor and a folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from tdserve.base.config import TransportName, check_transport
from tdserve.base.errors import NotSupportedError
from tdserve.bench.bench_options import FULL, QUICK, TRANSPORTS, BenchOptions, WorkloadSizes
from tdserve.bench.cpu_times import Processes, count_cpu, wait_for_processes
from tdserve.bench.figures import Figure, Scale, make_figure
from tdserve.bench.floor_link import FloorLink
from tdserve.bench.grpc_link import GRPC_STREAM, GrpcLink
from tdserve.bench.measure import SUBJECT, Pacing, Task, alternate
from tdserve.bench.targets import find_targets
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.client.tables.replay import ReplayHandle
from tdserve.launcher import Server

SERVER_ROOT = "root"
"""Name of the server's root in the folder of the stage."""


@dataclass(frozen=True)
class Case:
    """One figure to be measured: a line of a workload's table.

    Attributes:
        name: What is done.
        scale: The unit of the figure.
        subject: What tdserve does.
        floors: What it is compared with, by name.
        pacing: The length of a round; by default the usual one.
        max_rounds: The most rounds that it takes.
        counts_cpu: Whether the figure shows the CPU that an operation costs.
    """

    name: str
    scale: Scale
    subject: Task
    floors: Mapping[str, Task] = field(default_factory=dict)
    pacing: Pacing | None = None
    max_rounds: int = sys.maxsize
    counts_cpu: bool = True


@dataclass(frozen=True)
class Stage:
    """What workloads get.

    Attributes:
        client: Connected with the transport under test.
        transport: The transport under test, as both ends agreed on it: with ``auto`` that is known only now. It decides
            which floors are measured and which targets are meant.
        address: The server's address, for further clients.
        servers: The ids of the server's processes, by the part that they play.
        link: To the process of the gloo floor.
        grpc_link: To that of the gRPC floor; None unless gRPC is under test.
        folder: For local memory-mapped tensordicts, on the server's file system.
        options: What the run was asked for.
        sizes: How much data.
    """

    client: Client
    transport: TransportName
    address: str
    servers: Processes
    link: FloorLink
    folder: Path
    options: BenchOptions
    sizes: WorkloadSizes
    grpc_link: GrpcLink | None = None

    def make_stream_floors(self, *, out: int = 0, back: int = 0) -> dict[str, Task]:
        """Returns the floors of a stream, by name: that of the transport under test first."""
        gloo = {"gloo stream": self.link.make_floor(out=out, back=back)}
        return gloo if self.grpc_link is None else {GRPC_STREAM: self.grpc_link.make_floor(out=out, back=back), **gloo}

    def measure(self, workload: str, case: Case) -> Figure:
        """Runs a subject and its floors in turn and returns their figure."""
        num_rounds = min(self.options.num_rounds, case.max_rounds)
        pacing = case.pacing or Pacing(self.sizes.round_s)
        subject_task = count_cpu(case.subject, self.servers) if case.counts_cpu else case.subject
        floors = alternate({**case.floors, SUBJECT: subject_task}, num_rounds, pacing)
        subject, targets = floors.pop(SUBJECT), find_targets(self.transport, workload, case.name)
        return make_figure(workload, case.name, case.scale, subject=subject, floors=floors, targets=targets)

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
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="tdserve-bench-", dir=options.parent, ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        link = stack.enter_context(closing(FloorLink()))  # its process imports torch while the server starts
        server = stack.enter_context(Server(folder / SERVER_ROOT))
        client = stack.enter_context(connect(server.address, transport=options.transport))
        transport = check_transport(client.stats()["transport"])
        if transport not in TRANSPORTS:
            reason = f"only {' and '.join(TRANSPORTS)} have floors"
            raise NotSupportedError(feature=f"a benchmark over {transport!r}", reason=reason)
        grpc_link = stack.enter_context(closing(GrpcLink())) if transport == "grpc" else None
        sizes = QUICK if options.quick else FULL
        servers = wait_for_processes([server])
        yield Stage(client, transport, server.address, servers, link, folder, options, sizes, grpc_link)
