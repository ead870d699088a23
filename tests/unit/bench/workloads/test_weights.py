from __future__ import annotations

import pytest

from tdserve.bench.stage import Stage
from tdserve.bench.workloads.weights import measure_weights

pytestmark = pytest.mark.integration


def test_weights_when_measured_then_both_trees_have_their_five_figures_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure_weights(stage))
    assert [figure.name.partition(": ")[2] for figure in figures] == 2 * [
        "first publish",
        "publish, recycled",
        "latest(out=)",
        "latest()",
        "publish until seen elsewhere",
    ]
    assert [figure.target.bound for figure in figures if figure.target is not None] == [0.8, 0.8, 0.6, 0.6]
    assert not any(name.startswith("weights") for name in stage.client.stores())
