from __future__ import annotations

from collections.abc import Iterator

import pytest

from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.stage import Stage, open_stage


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose width counts, whatever runs the tests."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """A real server, a client and a floor link, for the workloads in quick sizes."""
    with open_stage(BenchOptions(quick=True, repeats=1)) as stage:
        yield stage


@pytest.fixture(scope="session")
def memory_stage() -> Iterator[Stage]:
    """The same, with a client over shared memory."""
    with open_stage(BenchOptions(quick=True, repeats=1, transport="shm")) as stage:
        yield stage
