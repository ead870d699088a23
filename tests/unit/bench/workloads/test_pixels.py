from __future__ import annotations

import pytest

from tdserve.bench.stage import Stage
from tdserve.bench.workloads.pixels import measure_pixels

pytestmark = pytest.mark.integration


def test_pixels_when_measured_then_all_are_judged_against_raw_gloo_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure_pixels(stage))
    assert len(figures) == 4
    assert all(figure.unit == "GB/s" and figure.floors[0].name.startswith("gloo") for figure in figures)
    assert {figure.target.bound for figure in figures if figure.target is not None} == {0.7}
    assert "pixels" not in stage.client.stores()
