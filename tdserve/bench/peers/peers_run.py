"""Has the systems take turns at each job, and prints the medians as a table in Markdown."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console

from tdserve.base.errors import TDServeError
from tdserve.bench.child import Child
from tdserve.bench.peers.contender import Contender
from tdserve.bench.peers.peer_jobs import PeerJob, make_jobs, run_jobs
from tdserve.bench.peers.ray_contender import RayActor
from tdserve.bench.peers.redis_contender import RedisStore
from tdserve.bench.peers.tdserve_contender import TDServeInSharedMemory, TDServeOverGloo
from tdserve.bench.peers.torchrl_contender import TorchRLOverRPC

CONTENDERS: tuple[type[Contender], ...] = (
    TDServeOverGloo,
    TDServeInSharedMemory,
    TorchRLOverRPC,
    RedisStore,
    RayActor,
)

NUM_ROUNDS = 5
ROUND_S, QUICK_ROUND_S = 1.0, 0.05
"""How long a system makes steps of a job in one round."""


def run_peers(console: Console, *, num_rounds: int | None, is_quick: bool, parent: Path | None) -> int:
    """Measures all systems that this machine has, and prints the table; says what others need.

    Args:
        num_rounds: Rounds of each job; None: five, or one of a quick run.
        is_quick: Whether sizes are small, to see that everything works.
        parent: Folder for the data of the run.

    Returns:
        The exit status: 1 if a system failed, which is said, and whose column ends there; otherwise 0.
    """
    jobs = make_jobs(is_quick=is_quick)
    figures: dict[str, dict[str, list[float]]] = {}
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="tdserve-peers-", dir=parent) as folder, ExitStack() as stack:
        clients: dict[str, Child] = {}
        for kind in CONTENDERS:
            if missing := kind.find_missing():
                console.print(f"{kind.label} is left out; it needs {missing}", markup=False)
                continue
            clients[kind.label] = stack.enter_context(_open_client(kind, Path(folder), is_quick))
            figures[kind.label] = {job.label: [] for job in jobs}
        for job in (job for _ in range(num_rounds or (1 if is_quick else NUM_ROUNDS)) for job in jobs):
            for label, client in list(clients.items()):
                try:
                    rate = client.ask((job.label, QUICK_ROUND_S if is_quick else ROUND_S))
                except TDServeError as error:
                    num_failed += 1
                    console.print(f"{label} failed at '{job.label}': {error}", style="bold red", markup=False)
                    del clients[label]
                    continue
                figures[label][job.label].append(job.convert(rate))
    for line in make_table(jobs, figures):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return int(num_failed > 0)


@contextmanager
def _open_client(kind: type[Contender], folder: Path, is_quick: bool) -> Iterator[Child]:
    own = folder / kind.__name__
    own.mkdir()
    with closing(Child(run_jobs, kind, own, is_quick)) as client:
        client.recv()  # one starts after the other, so that none is slow beside another's start
        yield client


def make_table(jobs: Sequence[PeerJob], figures: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Returns the lines of a table in Markdown: the median of each system at each job."""
    lines = [" | ".join(["| ", *figures]) + " |", "|---" * (len(figures) + 1) + "|"]
    for job in jobs:
        cells = [_format(job, found[job.label]) for found in figures.values()]
        lines.append(" | ".join([f"| {job.label}, {job.unit}", *cells]) + " |")
    return lines


def _format(job: PeerJob, found: Sequence[float]) -> str:
    if not found:
        return ""
    figure = median(found)
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
