from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_checksums_when_measured_then_compared_samples_stand_beside_others_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure(stage, "checksums"))
    assert [figure.name for figure in figures] == [
        f"{kind}: sample 256, one by one" for kind in ("transitions", "pixels")
    ]
    assert [[floor.name for floor in figure.floors] for figure in figures] == [["without"]] * 2
    assert all(figure.median > 0 for figure in figures)
    assert not {"plain", "compared"} & set(stage.client.stores())


def test_checksums_when_the_root_is_in_memory_then_nothing_is_measured(stage: Stage) -> None:
    assert list(measure(replace(stage, folder=Path("/dev/shm")), "checksums")) == []
