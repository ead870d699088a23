from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = [pytest.mark.integration, pytest.mark.full]

NAMES = [
    "sample 256, one by one",
    "sample 256, 8 under way",
    "sample 256, 8 under way, and update",
    "update 256 priorities",
    "sample 128 and update",
]


def test_prioritized_when_measured_then_stands_beside_uniform_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure(stage, "prioritized"))
    assert [figure.name for figure in figures] == NAMES
    assert all(figure.median > 0 for figure in figures)
    assert [[floor.name for floor in figure.floors] for figure in figures] == [["uniform"]] * 3 + [[]] * 2
    assert [[target.bound for target in figure.targets] for figure in figures] == [[0.7], [0.7], [], [], []]
    assert not {"uniform", "prioritized"} & set(stage.client.stores())
