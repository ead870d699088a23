"""What a run of ``tdserve bench`` is asked for, and how much it measures. Imports neither torch nor tensordict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tdserve.base.config import TransportName

WORKLOAD_NAMES = (
    "transitions",
    "pixels",
    "weights",
    "small",
    "prioritized",
    "checksums",
    "mixed",
    "chat",
    "dataset",
    "kv",
    "creation",
    "clients",
    "cluster",
)

USUAL_WORKLOADS = tuple(name for name in WORKLOAD_NAMES if name != "cluster")
"""Those of a run that names none: a cluster takes as many servers as it has shards, and as long as all others."""

FLOORS = "floors"
"""What every run measures before its workloads: the machine, without tdserve."""

SIMULATE = "simulate"
"""In place of a workload: nothing is measured."""

PEERS = "peers"
"""In place of workloads: tdserve beside what users could take instead."""

TRANSPORTS = ("gloo", "grpc", "shm")
"""The transports that have floors and targets of their own."""

MIB = 1 << 20


@dataclass(frozen=True)
class BenchOptions:
    """The command line of ``tdserve bench``.

    Attributes:
        workloads: The workloads to run, in this order.
        transport: What ``tdserve.connect`` is asked for.
        repeats: Rounds of every floor and every subject; they alternate. ``None`` means 5, or 2 when quick.
        quick: Small sizes and short rounds, to see that everything works. Targets are not judged.
        json_path: The file for all figures, each round included; ``None`` writes none.
        compare_path: Such a file of an earlier run, with which this one is compared.
        plot_path: The PNG file for a picture of the figures; ``None`` draws none.
        clients: The fewest and the most processes of the workloads ``clients`` and ``cluster``, which double them.
            ``None`` means 1 to 8, or to 2 when quick.
        shards: Numbers of servers of the workload ``cluster``, one after the other.
        parent: The folder that holds the server's root and the files of the local floors while the run lasts. ``None``
            means the temporary folder of the system; there, both sides get the same file system.
    """

    workloads: tuple[str, ...] = USUAL_WORKLOADS
    transport: TransportName = "gloo"
    repeats: int | None = None
    quick: bool = False
    json_path: Path | None = None
    compare_path: Path | None = None
    plot_path: Path | None = None
    clients: tuple[int, int] | None = None
    shards: tuple[int, ...] = (1, 2, 4)
    parent: Path | None = None

    @property
    def num_rounds(self) -> int:
        """The number of rounds of each measurement."""
        if self.repeats is not None:
            return self.repeats
        return 2 if self.quick else 5


@dataclass(frozen=True)
class WorkloadSizes:
    """How much data the workloads keep and how long a round lasts; by default a whole run.

    Apart from the trees of weights (number of tensors, bytes in all), the workloads themselves fix how much one
    operation moves.
    """

    round_s: float = 0.15
    replay_rows: int = 131_072
    pixel_rows: int = 4_096
    big_tree: tuple[int, int] = (100, 256 * MIB)
    many_tree: tuple[int, int] = (2_000, 64 * MIB)
    num_other_tensors: int = 100_000
    pause_s: float = 1.0
    num_histories: int = 16_384
    num_items: int = 10_000
    num_stores: int = 300
    num_many_stores: int = 5_000
    memcpy_nbytes: int = 256 * MIB
    mixed_s: float = 10.0
    num_clients: int = 8
    clients_s: float = 3.0
    num_more: int = 60
    idle_s: float = 1.0


FULL = WorkloadSizes()
"""A few minutes in all on two cores: long enough for a p99, short enough for a coffee."""

QUICK = WorkloadSizes(
    round_s=0.02,
    replay_rows=8_192,
    pixel_rows=512,
    big_tree=(100, 4 * MIB),
    many_tree=(200, 2 * MIB),
    num_other_tensors=1_000,
    pause_s=0.0,
    num_histories=512,
    num_items=300,
    num_stores=20,
    num_many_stores=50,
    memcpy_nbytes=32 * MIB,
    mixed_s=0.4,
    num_clients=2,
    clients_s=0.2,
    num_more=6,
    idle_s=0.1,
)
"""Only enough to see that everything works."""
