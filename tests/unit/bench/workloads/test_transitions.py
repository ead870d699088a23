from __future__ import annotations

import pytest

from tdserve.bench.stage import Stage
from tdserve.bench.workloads.transitions import measure_transitions

pytestmark = pytest.mark.integration


def test_transitions_when_measured_then_every_batch_size_has_a_latency_and_a_rate_and_no_store_is_left(
    stage: Stage,
) -> None:
    figures = list(measure_transitions(stage))
    sizes = [("extend 1", 2), ("extend 64", 2), ("extend 1024", 2), ("sample 256", 2)]
    assert [sum(figure.name.startswith(f"{name},") for figure in figures) for name, _ in sizes] == [n for _, n in sizes]
    assert all(figure.value > 0 and len(figure.floors) == 2 for figure in figures)
    assert "transitions" not in stage.client.stores()


def test_transitions_when_measured_then_the_plans_three_targets_stand_beside_them(stage: Stage) -> None:
    targets = {figure.name: figure.target for figure in measure_transitions(stage) if figure.target is not None}
    found = {name: (target.kind, target.bound) for name, target in targets.items()}
    assert found == {
        "extend 1024, 4 under way": ("at least", 2e6),
        "sample 256, one by one": ("below", 600.0),
        "sample 256, 8 under way": ("at least", 1e6),
    }
