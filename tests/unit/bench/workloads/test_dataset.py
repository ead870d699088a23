from __future__ import annotations

import os

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage
from tests.processes import children_of

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

NAMES = [
    "transitions: DataLoader, 4 workers",
    "transitions: store.batches",
    "pixels: DataLoader, 4 workers",
    "pixels: store.batches",
]


@pytest.mark.full
def test_dataset_when_measured_then_the_loader_is_judged_by_samples_and_nothing_is_left(memory_stage: Stage) -> None:
    before, names = set(children_of(os.getpid())), memory_stage.client.stores()
    figures = list(measure(memory_stage, "dataset"))
    assert [figure.name for figure in figures] == NAMES
    assert [figure.unit for figure in figures] == ["rows/s"] * 2 + ["GB/s"] * 2
    assert [[(target.bound, target.floor) for target in figure.targets] for figure in figures] == [
        [(0.7, "sample")],
        [],
    ] * 2
    assert [[floor.name for floor in figure.floors] for figure in figures] == [
        ["sample", "store[rows]"],
        ["sample"],
    ] * 2
    assert all(figure.median > 0 for figure in figures)
    assert memory_stage.client.stores() == names
    assert set(children_of(os.getpid())) <= before
