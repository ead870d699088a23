"""Fixtures and hooks of all tests. pyproject.toml declares the markers; this file implements them."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.lent.lender import lend
from tests.lent.servers import LendingPopen
from tests.lent.sitecustomize import DOOR_VARIABLE

# The same examples in every run: what CI finds, everybody finds. And what takes long on a busy machine is no fault:
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
    """Excludes the two million objects of imports and collection from garbage collection.

    Otherwise each of the many that tests ask for would take a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs ``e2e`` tests last: they take longest and locate faults least."""
    for item in items:
        if isinstance(item, pytest.Function) and (_is_left_out_once(item) or _is_left_out_in_turns(item)):
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


_TRANSPORT_PARAMETERS = ("transport", "client")


def _is_left_out_once(item: pytest.Function) -> bool:
    once = item.get_closest_marker("once")
    return once is not None and once.args[0] not in {item.callspec.params.get(name) for name in _TRANSPORT_PARAMETERS}


def _is_left_out_in_turns(item: pytest.Function) -> bool:
    if item.get_closest_marker("turns") is None:
        return False
    places = _find_places(item)
    (transport,) = (places.pop((name,)) for name in _TRANSPORT_PARAMETERS if (name,) in places)
    return sum(places.values()) % 2 != transport


def _find_places(item: pytest.Function) -> dict[tuple[str, ...], int]:
    """Returns the place of a test's value in the list of each parameter, or of each group of parameters.

    pytest's ``indices`` are such places for parameters of fixtures only; for others they count the tests.
    """
    places: dict[tuple[str, ...], int] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], (list, tuple)) else mark.args[0].replace(" ", "").split(",")
        own = [item.callspec.params[name] for name in names]
        for place, given in enumerate(mark.args[1]):
            values = given.values if isinstance(given, type(pytest.param())) else given if len(names) > 1 else (given,)
            if all(value is mine for value, mine in zip(values, own, strict=True)):
                places[tuple(names)] = place
                break
    direct = {name for names in places for name in names}
    return places | {(name,): place for name, place in item.callspec.indices.items() if name not in direct}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a ``gpu`` test on a machine without GPU. torch is imported for those tests only."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
