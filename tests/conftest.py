"""What every test shares: markers are declared in pyproject.toml; here is what they and the environment mean."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# The same examples in every run: what CI finds, everybody finds. And what takes long on a busy machine is no fault:
# pytest's own timeout ends what hangs.
settings.register_profile("tdserve", deadline=None, derandomize=True, database=None)
settings.load_profile("tdserve")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's ``TDSERVE_*`` settings do not reach the tests."""
    for name in [name for name in os.environ if name.startswith("TDSERVE_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What was imported and collected, two million objects, stays to the end: no collection of garbage looks at it.

    Otherwise each of the many that tests ask for would take a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``e2e`` tests come last: they take the longest, and say the least about where a fault is."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a ``gpu`` test where there is none. torch is imported for those tests only."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
