from __future__ import annotations

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.bench import content
from tdserve.bench.figures import Scale, Target
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.row_floors import TORCHRL
from tdserve.bench.workloads.rows import open_rows

pytestmark = pytest.mark.integration


def test_rows_when_opened_then_the_store_is_full_of_the_pool(stage: Stage) -> None:
    pool = content.transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        assert len(rows.replay) == 1_024
        content.check_rows(rows.replay.sample(64), pool, source_key="reward", what="test")
    assert "rows" not in stage.client.stores()


def test_rows_when_a_sample_is_not_what_was_written_then_the_measurement_fails(stage: Stage) -> None:
    pool = content.transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        pool["action"] += 1.0
        with pytest.raises(CorruptDataError, match="action"):
            rows.sample_one_by_one(64, Scale("us"))


def test_batches_when_taken_on_and_on_then_start_again_and_are_always_whole(stage: Stage) -> None:
    pool = content.transitions(512)
    with open_rows(stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        next_batch = rows.batches(200)
        assert [int(next_batch()["reward"][0]) for _ in range(4)] == [0, 200, 0, 200]


def test_rows_when_torchrl_is_not_compared_with_then_the_targets_that_mean_it_are_left_out(memory_stage: Stage) -> None:
    pool = content.transitions(512)
    targets = (Target("of floor", 0.5, TORCHRL), Target("below", 1e9))
    with open_rows(memory_stage, "rows", pool, source_key="reward", capacity=1_024) as rows:
        figure = rows.sample_one_by_one(8, Scale("us"), targets=targets)
    assert figure.targets == targets[1:]
