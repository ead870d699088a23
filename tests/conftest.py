"""Fixtures and hooks of all tests. pyproject.toml declares the markers; this file implements them."""

from __future__ import annotations

import gc
import os
import subprocess
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.lent.lender import lend
from tests.lent.servers import LendingPopen
from tests.lent.sitecustomize import DOOR_VARIABLE

# The same examples in every run: what CI finds, everybody finds. Slowness on a busy machine is no fault:
# pytest's own timeout ends what hangs.
settings.register_profile("tdserve", deadline=None, derandomize=True, database=None)
settings.load_profile("tdserve")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Starts processes that import torch once for a whole run and fork servers, data workers and clients; see
    ``tests.lent``."""
    subprocess.Popen = LendingPopen  # type: ignore[misc]
    if not hasattr(session.config, "workerinput"):  # one for all processes of a run
        folder = TemporaryDirectory(prefix="tdserve-lent-")
        lending = ExitStack()
        lending.enter_context(folder)
        lending.enter_context(lend(Path(folder.name)))
        session.config.add_cleanup(lending.close)
    return (yield)


@pytest.fixture(scope="module")
def borrows_nothing() -> Iterator[None]:
    """Makes everything start as in production: the process that forks data workers is a child of its server, and a
    child of the benchmark is the process that works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DOOR_VARIABLE)
        yield


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides a developer's ``TDSERVE_*`` settings from the tests."""
    for name in [name for name in os.environ if name.startswith("TDSERVE_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes from garbage collection the two million objects that imports and pytest's collection have made.

    Otherwise each collection that a test asks for would take a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


NUM_TURNS = 6
"""Slow tests are divided into so many turns."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that names a turn of slow tests."""
    parser.addoption("--turn", type=int, help=f"runs also one in {NUM_TURNS} slow tests: another one for each number")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests, and tests that others repeat, to ``-m full``. Runs ``e2e`` tests last: they locate faults
    least."""
    functions = [item for item in items if isinstance(item, pytest.Function) and not item.get_closest_marker("full")]
    for item in [*_find_left_out(functions), *_find_slow(functions, config.getoption("turn"))]:
        item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def _find_slow(items: list[pytest.Function], turn: int | None) -> Iterator[pytest.Function]:
    """Finds slow tests whose turn it is not. Each of a test's parameters has a turn of its own."""
    for item in items:
        if item.get_closest_marker("slow") and (turn is None or (zlib.crc32(item.nodeid.encode()) - turn) % NUM_TURNS):
            yield item


_TRANSPORTS = {"gloo", "grpc", "shm"}


def _find_left_out(items: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Finds tests that differ from one that runs by their transport alone.

    Conformance suites run over each. Of the others, the code that they examine is the same for all transports, so these
    take turns over the tests, and over the values of other parameters; ``once`` names the one that shows most.
    """
    tests: dict[str, dict[tuple[object, ...], list[pytest.Function]]] = {}
    for item in items:
        params: dict[str, object] = item.callspec.params if hasattr(item, "callspec") else {}
        named = (name for name, value in params.items() if isinstance(value, str) and value in _TRANSPORTS)
        parameter = next(named, None)
        if parameter is None or "/conformance/" in item.nodeid:
            continue
        once = item.get_closest_marker("once")
        if once is None:
            others = tuple((name, id(value)) for name, value in params.items() if name != parameter)
            tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(others, []).append(item)
        elif once.args[0] != params[parameter]:
            yield item
    for test, groups in tests.items():
        for turn, group in enumerate(groups.values(), zlib.crc32(test.encode())):
            chosen = group[turn % len(group)]
            yield from (item for item in group if item is not chosen)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a ``gpu`` test on a machine without GPU. torch is imported for those tests only."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
