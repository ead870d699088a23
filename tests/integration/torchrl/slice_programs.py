"""Programs that draw slices of trajectories, over TorchRL's own storage or over a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler, SliceSamplerWithoutReplacement

from tests.integration.torchrl.program_rows import MakeStorage, describe, make_episodes


def draw_slices(make: MakeStorage, _: Path, **settings: Any) -> Any:
    buffer = TensorDictReplayBuffer(storage=make(), sampler=SliceSampler(slice_len=3, **settings), batch_size=12)
    buffer.extend(make_episodes(2, 4, 4))
    rows, info = buffer.sample(return_info=True)
    steps, episodes = rows["step"].view(4, 3), rows["episode"].view(4, 3)
    assert (steps.diff() == 1).all()
    assert (episodes == episodes[:, :1]).all()
    assert (rows["obs"] == rows["index"][:, 0]).all()
    flags = {key: info["next", key].view(4, 3).tolist() for key in ("truncated", "terminated")}
    assert (info["next", "done"].view(4, 3) == ((steps == 3) | (torch.arange(3) == 2))).all()
    key = buffer.sampler.traj_key
    return describe(rows), flags, sorted(map(str, info)), key, buffer.sampler.can_sample(buffer.storage, 12)


def draw_slices_by_trajectory(make: MakeStorage, folder: Path) -> Any:
    return draw_slices(make, folder, traj_key="episode")


def draw_slices_by_end(make: MakeStorage, folder: Path) -> Any:
    return draw_slices(make, folder, end_key=("next", "done"))


def draw_slices_without_a_key(make: MakeStorage, folder: Path) -> Any:
    return draw_slices(make, folder)


def draw_slices_by_ends_since_rows_have_no_trajectory(make: MakeStorage, folder: Path) -> Any:
    return draw_slices(make, folder, traj_key="trajectory")


def draw_slices_by_ends_without_a_buffer(make: MakeStorage, _: Path) -> Any:
    storage = make()
    storage.set(range(8), make_episodes(4, 4))
    (index,), _ = SliceSampler(num_slices=8, traj_key="trajectory").sample(storage, 32)
    assert ((index.view(8, 4) - torch.arange(4)) % 4 == 0).all()
    sampler = SliceSamplerWithoutReplacement(slice_len=4, traj_key="trajectory")
    (index,), info = sampler.sample(storage, 8)
    return sorted(index.view(2, 4).tolist()), info["next", "truncated"].flatten().tolist()


def draw_slices_with_cached_ends(make: MakeStorage, folder: Path) -> Any:
    return draw_slices(make, folder, traj_key="episode", cache_values=True)


def draw_slices_that_nobody_has(make: MakeStorage, _: Path) -> Any:
    buffer = ReplayBuffer(storage=make(), sampler=SliceSampler(slice_len=5, traj_key="episode"), batch_size=5)
    buffer.extend(make_episodes(4, 4))
    with pytest.raises(RuntimeError) as refused:
        buffer.sample()
    with pytest.raises(RuntimeError, match="divisible"):
        buffer.sample(6)
    return str(refused.value)


def draw_short_slices(make: MakeStorage, _: Path) -> Any:
    sampler = SliceSampler(slice_len=5, traj_key="episode", strict_length=False)
    buffer = TensorDictReplayBuffer(storage=make(), sampler=sampler, batch_size=10)
    buffer.extend(make_episodes(3, 3))
    rows = buffer.sample()
    return describe(rows), rows["step"].tolist(), rows["next", "truncated"].flatten().tolist()


SLICE_PROGRAMS = [
    draw_slices_by_trajectory,
    draw_slices_by_end,
    draw_slices_without_a_key,
    draw_slices_by_ends_since_rows_have_no_trajectory,
    draw_slices_by_ends_without_a_buffer,
    draw_slices_with_cached_ends,
    draw_slices_that_nobody_has,
    draw_short_slices,
]
