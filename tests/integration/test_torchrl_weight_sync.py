"""TorchRL's collectors act with the weights that a trainer publishes: real workers, real weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import tdserve
from tests.processes import wait_for

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it deprecates its own classes when it is imported
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

from tdserve.torchrl import TDServeWeightSyncScheme
from tests.torchrl_environment import TellingEnvironment

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TIMEOUT_S = 60.0
NUM_WORKERS, NUM_ROWS = 2, 8


class Constant(nn.Module):
    """Acts with its only weight, whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand_as(observation)


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.full), "gloo"])
def scheme(server: tdserve.Server, request: pytest.FixtureRequest) -> Iterator[TDServeWeightSyncScheme]:
    name = request.node.name
    yield TDServeWeightSyncScheme(server.address, name, transport=request.param, timeout_s=TIMEOUT_S)
    with server.client() as client:
        for store in (name, f"{name}.receivers"):
            client.delete(store)


def have_version(scheme: TDServeWeightSyncScheme, version: int) -> bool:
    return {each.version for each in scheme.receivers().values()} == {version}


@pytest.mark.slow
def test_workers_when_a_trainer_publishes_then_act_with_the_new_weights(
    server: tdserve.Server, scheme: TDServeWeightSyncScheme
) -> None:
    constant = Constant()
    policy = TensorDictModule(constant, in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector(
        [TellingEnvironment] * NUM_WORKERS,
        policy,
        frames_per_batch=NUM_WORKERS * NUM_ROWS,
        total_frames=6 * NUM_WORKERS * NUM_ROWS,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    seen: list[tuple[set[float], set[int]]] = []
    try:
        for number, batch in enumerate(collector, 1):
            processes = set(batch["process"].flatten().tolist())
            assert len(processes) == NUM_WORKERS
            assert os.getpid() not in processes
            actions = set(batch["action"].flatten().tolist())
            versions = set(batch["next", "policy_version"].flatten().tolist())
            seen.append((actions, versions))
            constant.weight.data.fill_(float(number))
            if number < 3:
                collector.update_policy_weights_()
            else:  # anybody may publish, and nobody waits for the workers then
                with server.client() as client:
                    version = client.publish(scheme.name, policy)
                wait_for(partial(have_version, scheme, version), "the workers", timeout_s=TIMEOUT_S)
        states = scheme.receivers()
    finally:
        collector.shutdown()
    assert seen == [({float(number)}, {number + 1}) for number in range(6)]
    assert {name: state.last_error for name, state in states.items()} == {"0": "", "1": ""}
    assert all(state.age_s < TIMEOUT_S for state in states.values())


@pytest.mark.full
def test_workers_when_they_never_wait_for_each_other_then_act_with_the_new_weights_too(
    scheme: TDServeWeightSyncScheme,
) -> None:
    constant = Constant()
    policy = TensorDictModule(constant, in_keys=["observation"], out_keys=["action"])
    collector = MultiAsyncCollector(
        [TellingEnvironment] * NUM_WORKERS,
        policy,
        frames_per_batch=NUM_ROWS,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    )
    remaining = {0.0, 1.0, 2.0}
    try:
        for batch in collector:
            remaining -= set(batch["action"].flatten().tolist())
            if not remaining:
                break
            constant.weight.data.fill_(min(remaining))
            collector.update_policy_weights_()  # batches that were made before come first
    finally:
        collector.shutdown()
