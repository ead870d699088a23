from __future__ import annotations

import pytest

from tdserve.bench.floors import (
    LOCAL_GATHER,
    LOCAL_GATHER_TOUCHED,
    LOCAL_INDEXING,
    LOCAL_MEMMAP,
    MEMCPY,
    OVER_GLOO,
    TORCHRL,
)
from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage
from tdserve.bench.torchrl_buffer import has_torchrl

pytestmark = [pytest.mark.integration, pytest.mark.full]

NAMES = [
    *("extend 1", "extend 1", "extend 64", "extend 64", "extend 1024", "extend 1024", "extend 1024"),
    *("append through writer(64)", "sample 256", "sample 256"),
]
TARGETS = {
    "extend 64, one by one": ("below", 1100.0),
    "extend 1024, 16 under way": ("at least", 2e6),
    "append through writer(64)": ("at least", 5e4),
    "sample 256, one by one": ("of floor", 1 / 1.8),
    "sample 256, 8 under way": ("at least", 1.5e6),
}


def test_transitions_when_measured_then_all_sizes_have_figures_and_the_plans_targets_and_no_store_is_left(
    stage: Stage,
) -> None:
    figures = list(measure(stage, "transitions"))
    assert [figure.name.partition(",")[0] for figure in figures] == NAMES
    assert all(figure.median > 0 for figure in figures)
    assert all({"control CPU", "workers CPU", "client CPU"} <= figure.details.keys() for figure in figures)
    assert [len(figure.floors) for figure in figures] == [2] * 7 + [0, 3, 2]
    targets = {figure.name: (target.kind, target.bound) for figure in figures for target in figure.targets}
    assert targets == TARGETS
    assert "transitions" not in stage.client.stores()


@pytest.mark.full
def test_transitions_when_measured_in_memory_then_samples_are_judged_against_torchrl(memory_stage: Stage) -> None:
    figures = {figure.name: figure for figure in measure(memory_stage, "transitions")}
    for name in ("sample 256, one by one", "sample 256, 8 under way"):
        floors = [floor.name for floor in figures[name].floors]
        torchrl = [TORCHRL] if has_torchrl() else []
        assert floors == [LOCAL_GATHER, LOCAL_GATHER_TOUCHED, LOCAL_INDEXING, *torchrl, OVER_GLOO]
        assert [(target.bound, target.floor) for target in figures[name].targets] == [(0.5, TORCHRL)][: len(torchrl)]
    assert [floor.name for floor in figures["extend 1024, one by one"].floors] == [MEMCPY, LOCAL_MEMMAP]
    assert "transitions" not in memory_stage.client.stores()
