from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_small_when_measured_then_gets_one_and_lists_keys_and_stores_and_leaves_none(stage: Stage) -> None:
    figures = list(measure(stage, "small"))
    assert [figure.name for figure in figures] == [
        "get one scalar of 300",
        "keys of a store of 300",
        "read a small tensordict by name",
        "send a small tensordict",
        "names of 20 stores",
    ]
    assert [figure.unit for figure in figures] == ["us", "ms", "us", "us", "ms"]
    bounds = [[target.bound for target in figure.targets] for figure in figures]
    assert bounds == [[450.0], [10.0], [180.0], [760.0], [10.0]]
    assert stage.client.stores() == []


@pytest.mark.slow
def test_small_when_measured_in_memory_then_a_scalar_is_asked_for_in_60_us(memory_stage: Stage) -> None:
    scalar = next(iter(measure(memory_stage, "small")))
    assert [floor.name for floor in scalar.floors] == ["local memmap"]
    assert [target.bound for target in scalar.targets] == [60.0]
