from __future__ import annotations

import pytest
from tensordict import TensorDictBase

from tdserve.base.errors import CorruptDataError
from tdserve.bench import workload_data
from tdserve.bench.measure import Pacing
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.replay_rounds import make_samples
from tdserve.bench.workloads.replays import open_filled

pytestmark = pytest.mark.integration

PACING = Pacing(0.0, min_ops=3)


def refuse(batch: TensorDictBase) -> None:
    raise CorruptDataError(path="test", expected="other rows", actual=str(len(batch)))


@pytest.mark.parametrize("window", [1, 8])
def test_samples_when_a_round_is_done_then_every_one_is_timed_and_the_last_is_checked(
    stage: Stage, window: int
) -> None:
    with open_filled(stage, "sampled", workload_data.make_transitions(512), 512) as replay:
        task = make_samples(replay, 8, window, refuse)
        done = task.run_round(PACING)
        assert len(done.op_s) == 3
        assert task.check is not None
        with pytest.raises(CorruptDataError, match="found 8"):
            task.check(done.last)


def test_samples_when_something_is_done_after_each_then_gets_every_batch(stage: Stage) -> None:
    found: list[TensorDictBase] = []
    with open_filled(stage, "sampled", workload_data.make_transitions(512), 512) as replay:
        make_samples(replay, 8, 8, refuse, after_each=found.append).run_round(PACING)
    assert [len(batch) for batch in found] == [8, 8, 8]
