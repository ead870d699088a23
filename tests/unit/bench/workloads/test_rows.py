from __future__ import annotations

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.bench import content
from tdserve.bench.figures import Scale
from tdserve.bench.floors import LOCAL_GATHER, OVER_GLOO
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import make_pipelined_samples, make_single_samples
from tdserve.bench.workloads.replays import open_rows

pytestmark = pytest.mark.integration


def test_rows_when_opened_then_the_store_is_full_of_the_pool(stage: Stage) -> None:
    pool = content.make_transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        assert len(rows.replay) == 1_024
        content.check_rows(rows.replay.sample(64), pool, source_key="reward", what="test")
    assert "rows" not in stage.client.stores()


def test_rows_when_a_sample_is_not_what_was_written_then_the_measurement_fails(stage: Stage) -> None:
    pool = content.make_transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        pool["action"] += 1.0
        with pytest.raises(CorruptDataError, match="action"):
            rows.sample_one_by_one(64, Scale("us"))


def test_batches_when_taken_on_and_on_then_start_again_and_are_always_whole(stage: Stage) -> None:
    pool = content.make_transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        next_batch = rows.make_batches(200)
        assert [int(next_batch()["reward"][0]) for _ in range(4)] == [0, 200, 0, 200]


def test_rows_when_torchrl_is_not_compared_with_then_the_targets_that_mean_it_are_left_out(memory_stage: Stage) -> None:
    with open_rows(memory_stage, "pixels", content.make_pixels(512), source_key="action", capacity=512) as rows:
        figure = rows.sample_one_by_one(8, Scale("us"))
    assert [target.floor for target in figure.targets] == [LOCAL_GATHER, OVER_GLOO]


def test_floors_when_the_wire_is_gloo_then_it_comes_first_and_every_one_runs(stage: Stage) -> None:
    with open_rows(stage, "rows", content.make_transitions(512), source_key="reward", capacity=512) as rows:
        found = [
            rows.write_floors(8, is_acknowledged=True),
            rows.write_floors(8, is_acknowledged=False),
            rows.read_floors(8, make_single_samples),
            rows.read_floors(8, make_pipelined_samples),
        ]
        assert all(task.run_round(stage.pacing).op_s for tasks in found for task in tasks.values())
    firsts = ["gloo, acknowledged", "gloo stream", "gloo, asked for", "gloo stream"]
    assert [list(tasks) for tasks in found] == [[first, "local memmap"] for first in firsts]
