from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_creation_when_measured_then_beside_few_and_beside_many_and_leaves_none(stage: Stage) -> None:
    figures = list(measure(stage, "creation"))
    assert [figure.name for figure in figures] == [
        "create a store",
        "delete a store",
        "create a store beside 50",
        "delete a store beside 50",
    ]
    assert [[target.bound for target in figure.targets] for figure in figures] == [[757.0]] * 4
    assert stage.client.stores() == []
