from __future__ import annotations

import pytest

from tdserve.bench.stage import Stage
from tdserve.bench.workloads.transitions import measure_transitions

pytestmark = pytest.mark.integration

NAMES = [
    *("extend 1", "extend 1", "extend 64", "extend 64", "extend 1024", "extend 1024", "extend 1024"),
    *("append through writer(64)", "sample 256", "sample 256"),
]
TARGETS = {
    "extend 1024, 16 under way": ("at least", 2e6),
    "append through writer(64)": ("at least", 5e4),
    "sample 256, one by one": ("below", 600.0),
    "sample 256, 8 under way": ("at least", 1.5e6),
}


def test_transitions_when_measured_then_all_sizes_have_figures_and_the_plans_targets_and_no_store_is_left(
    stage: Stage,
) -> None:
    figures = list(measure_transitions(stage))
    assert [figure.name.partition(",")[0] for figure in figures] == NAMES
    assert all(figure.value > 0 and len(figure.floors) == (0 if "writer" in figure.name else 2) for figure in figures)
    targets = {figure.name: (figure.target.kind, figure.target.bound) for figure in figures if figure.target}
    assert targets == TARGETS
    assert "transitions" not in stage.client.stores()
