from __future__ import annotations

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.bench import workload_data
from tdserve.bench.floors import GLOO_AND_GATHER, LOCAL_GATHER, OVER_GLOO
from tdserve.bench.measure import Pacing
from tdserve.bench.stage import Stage
from tdserve.bench.workloads import replays
from tdserve.bench.workloads.replays import open_rows

pytestmark = pytest.mark.integration


def test_rows_when_opened_then_the_store_is_full_of_the_pool(stage: Stage) -> None:
    with open_rows(stage, "rows", workload_data.make_transitions, 512, 1_024) as rows:
        assert len(rows.replay) == 1_024
        rows.pool.check(rows.replay.sample(64))
    assert "rows" not in stage.client.stores()


def test_rows_when_a_sample_is_not_what_was_written_then_the_measurement_fails(stage: Stage) -> None:
    with open_rows(stage, "rows", workload_data.make_transitions, 512, 1_024) as rows:
        rows.pool.rows["action"] += 1.0
        with pytest.raises(CorruptDataError, match="action"):
            stage.measure("rows", rows.sample(64, 1))


@pytest.mark.slow
def test_rows_when_torchrl_is_missing_then_the_targets_that_mean_it_are_left_out(
    memory_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "has_torchrl", lambda: False)
    with open_rows(memory_stage, "pixels", workload_data.make_pixels, 512, 512) as rows:
        figure = memory_stage.measure("pixels", rows.sample(8, 1))
    assert [target.floor for target in figure.targets] == [LOCAL_GATHER, OVER_GLOO]


def test_floors_when_the_wire_is_gloo_then_it_comes_first_and_every_one_runs(stage: Stage) -> None:
    with open_rows(stage, "rows", workload_data.make_transitions, 512, 512) as rows:
        found = [measured(8, window).floors for measured in (rows.extend, rows.sample) for window in (1, 8)]
        assert all(task.run_round(Pacing(0.02)).op_s for tasks in found for task in tasks.values())
    firsts = ["gloo, acknowledged", "gloo stream", "gloo, asked for", "gloo stream"]
    sums = [[], [], [GLOO_AND_GATHER], []]
    assert [list(tasks) for tasks in found] == [
        [first, *between, "local memmap"] for first, between in zip(firsts, sums, strict=True)
    ]
