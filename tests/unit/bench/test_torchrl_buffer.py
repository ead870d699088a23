from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tdserve.bench.measure import Pacing
from tdserve.bench.torchrl_buffer import TorchRLBuffer, has_torchrl
from tdserve.bench.workload_data import make_pixels, make_transitions

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not has_torchrl(), reason="torchrl is not installed (it cannot be with this tensordict, but by --no-deps)"
    ),
]


@pytest.mark.slow
def test_buffer_when_sampled_then_times_every_sample_and_keeps_its_rows_in_the_folder(tmp_path: Path) -> None:
    with closing(TorchRLBuffer(make_transitions, 32, 96, tmp_path / "rows")) as buffer:
        assert buffer.recv() == 96
        task = buffer.make_floor(16)
        assert [len(task.run_round(Pacing(0.0, min_ops=3)).op_s) for _ in range(2)] == [3, 3]
        assert list((tmp_path / "rows").iterdir()) != []


@pytest.mark.full
def test_buffer_when_the_capacity_is_no_multiple_of_the_pool_then_is_full_all_the_same(tmp_path: Path) -> None:
    with closing(TorchRLBuffer(make_pixels, 4, 10, tmp_path / "rows")) as buffer:
        assert buffer.recv() == 10
