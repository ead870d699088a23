"""One event loop and one data worker for all tests of the control process: a worker takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base.worker_arguments import WorkerArguments
from tdserve.server.dispatch.requests import Requests
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.tables.claiming import Claiming
from tests.unit.server.world import Loop, World


@pytest.fixture(scope="session")
def run() -> Iterator[Loop]:
    """A loop that runs coroutines."""
    made = Loop()
    yield made
    made.loop.run_until_complete(made.loop.shutdown_default_executor())
    made.loop.close()


@pytest.fixture(scope="session")
def processes(run: Loop) -> Iterator[WorkerProcesses]:
    """The starter of data worker processes."""
    made = WorkerProcesses()
    yield made
    run(made.stop())


@pytest.fixture(scope="session")
def lost_workers() -> list[DataWorker]:
    """Receives the data worker each time that it is lost."""
    return []


@pytest.fixture(scope="session")
def worker(run: Loop, processes: WorkerProcesses, lost_workers: list[DataWorker]) -> Iterator[DataWorker]:
    """A live data worker."""
    made = DataWorker(
        WorkerArguments(0, transfer_timeout_s=5.0),
        processes,
        timeout_s=4.0,
        on_session=lambda report: None,
        on_lost=lost_workers.append,
    )

    async def start() -> None:
        made.start()
        await made.ready.wait()

    run(start())
    yield made
    run(made.stop())


@pytest.fixture
def world(tmp_path: Path, worker: DataWorker) -> Iterator[World]:
    """The parts of a control process on a fresh root."""
    made = World(tmp_path / "root", worker)
    yield made
    made.close()


@pytest.fixture
def requests(world: World) -> Requests:
    """The router over the parts of the world."""
    return world.requests


@pytest.fixture
def claiming(world: World) -> Claiming:
    """Lets writers claim rows of the world's tables."""
    return Claiming(world.stores, world.answers, traffic=world.traffic)
