from __future__ import annotations

import pytest

from tdserve.bench.floors import LOCAL_GATHER, MEMCPY, OVER_GLOO, TORCHRL
from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage
from tdserve.bench.torchrl_buffer import has_torchrl

pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_pixels_when_measured_then_all_are_judged_against_raw_gloo_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure(stage, "pixels"))
    assert len(figures) == 4
    assert all(figure.unit == "GB/s" and figure.floors[0].name.startswith("gloo") for figure in figures)
    assert [[(target.bound, target.floor) for target in figure.targets] for figure in figures] == [[(0.7, "")]] * 4
    assert "pixels" not in stage.client.stores()


@pytest.mark.full
def test_pixels_when_measured_in_memory_then_writes_are_judged_by_memcpy_and_samples_by_three(
    memory_stage: Stage,
) -> None:
    figures = list(measure(memory_stage, "pixels"))
    found = [[(target.bound, target.floor) for target in figure.targets] for figure in figures]
    of_torchrl = [(1 / 1.3, TORCHRL)] if has_torchrl() else []
    written, sampled = [(0.7, MEMCPY)], [(0.7, LOCAL_GATHER), *of_torchrl, (4.0, OVER_GLOO)]
    assert found == [written, written, sampled, sampled]
    assert "pixels" not in memory_stage.client.stores()
