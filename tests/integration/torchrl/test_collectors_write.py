"""TorchRL's collectors write through a buffer over a table, from their workers."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

import tdserve

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it deprecates its own classes when it is imported
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.data import TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler

from tdserve.torchrl import TDServeStorage
from tests.torchrl_environment import TellingEnvironment

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:A SliceSampler is used"),
]

NUM_FRAMES, NUM_BATCHES = 40, 3


KINDS = [(Collector, 0), (MultiSyncCollector, 2), pytest.param((MultiAsyncCollector, 2), marks=pytest.mark.full)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind[0].__name__))
def test_collector_when_it_has_a_buffer_over_a_table_then_its_workers_write_into_it(
    kind: tuple[Any, int], server: tdserve.Server
) -> None:
    make_collector, num_workers = kind
    storage = TDServeStorage(1000, address=server.address, name=f"collected-{make_collector.__name__}")
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=400, shared=num_workers > 0)
    environments = [TellingEnvironment] * num_workers if num_workers else TellingEnvironment()
    total = NUM_FRAMES * NUM_BATCHES
    collector = make_collector(
        environments, None, frames_per_batch=NUM_FRAMES, total_frames=total, replay_buffer=buffer
    )
    try:
        num_batches = sum(1 for _ in collector)
    finally:
        collector.shutdown()
    assert num_batches >= NUM_BATCHES
    assert len(buffer) == buffer.write_count >= total
    processes = set(buffer[:]["process"].flatten().tolist())
    assert len(processes) == max(num_workers, 1)
    assert (os.getpid() in processes) == (num_workers == 0)
    slices = buffer.sample().reshape(100, 4)
    assert (slices["step"].squeeze(-1).diff() == 1).all()
    assert (slices["process"] == slices["process"][:, :1]).all()
    with server.client() as client:
        client.delete(storage.table_name)
