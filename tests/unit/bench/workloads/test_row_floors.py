from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from tdserve.bench import content
from tdserve.bench.floors import MappedRows
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.row_floors import GlooRowFloors

pytestmark = pytest.mark.integration


def test_gloo_floors_when_asked_for_then_the_wire_comes_first_and_every_one_runs(stage: Stage, tmp_path: Path) -> None:
    pool = content.transitions(8)
    floors = GlooRowFloors(stage, pool, MappedRows(pool, 16, tmp_path / "rows"))
    next_batch = cycle([pool]).__next__
    found = [floors.store(8, next_batch), floors.stream_out(8, next_batch), floors.fetch(8), floors.stream_in(8)]
    firsts = ["gloo, acknowledged", "gloo stream", "gloo, asked for", "gloo stream"]
    assert [list(tasks) for tasks in found] == [[first, "local memmap"] for first in firsts]
    assert all(task.run_round().op_s for tasks in found for task in tasks.values())
