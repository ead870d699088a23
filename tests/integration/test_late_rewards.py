"""Groups of rollouts whose rewards come late. They count while they wait, and leave as whole groups when they are too
old."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

GROUP_SIZE = 4


def rollouts(*prompts: int) -> TensorDict:
    """Returns a group for each prompt, without rewards."""
    prompt = torch.tensor(prompts).repeat_interleave(GROUP_SIZE)
    return TensorDict({"prompt": prompt, "tokens": torch.zeros(len(prompt), 5)}, [len(prompt)])


@pytest.fixture
def table(client: tdserve.Client, name: str) -> Any:
    """A table of four groups that follows a policy of one version, and where writers wait for room."""
    policy = f"p-{name}"
    client.publish(policy, TensorDict({"w": torch.zeros(1)}))
    like = TensorDict({"prompt": torch.tensor(0), "tokens": torch.zeros(5), "reward": torch.tensor(0.0)})
    limiter = tdserve.Queue(4 * GROUP_SIZE)
    made = client.create_replay(name, like, 4 * GROUP_SIZE, policy=policy, limiter=limiter, max_times_sampled=1)
    yield made
    client.delete(policy)


def sample(table: Any, num_groups: int = 1, **options: Any) -> Any:
    """Draws whole groups that are at most one version old."""
    options = {"group_by": "prompt", "group_size": GROUP_SIZE, "max_lag": 1, "timeout_s": 20.0} | options
    return table.sample(num_groups * GROUP_SIZE, **options)


def test_info_when_rewards_are_late_then_counts_rows_that_wait(client: tdserve.Client, table: Any) -> None:
    index = table.extend(rollouts(1, 2))
    assert table.info()["num_incomplete"] == 8
    table.set_at_("reward", torch.ones(6), index[:6])
    assert table.info()["num_incomplete"] == 2
    assert set(sample(table)["prompt"].tolist()) == {1}
    with pytest.raises(tdserve.DeadlineExceededError, match="'reward' is missing in 2"):
        sample(table, timeout_s=0)
    table.delete(index[4:])
    assert table.info()["num_incomplete"] == 0


def test_sample_when_groups_are_too_old_then_they_leave_whole_and_writers_get_their_room(
    client: tdserve.Client, table: Any
) -> None:
    index = table.extend(rollouts(1, 2, 3))
    table.set_at_("reward", torch.ones(4), index[:4])
    for _ in range(2):
        client.publish(table.settings.policy, TensorDict({"w": torch.zeros(1)}))
    mixed = table.extend(rollouts(4)[:2], policy_version=1)  # of a version too old already
    rest = table.extend(rollouts(4)[2:])
    table.set_at_("reward", torch.ones(4), torch.cat([mixed, rest]))
    waiting = client.run_later(lambda: sample(table))
    fresh = client.run_later(lambda: table.extend(rollouts(5)))  # has no room before they leave
    table.set_at_("reward", torch.ones(4), fresh.result(20.0))
    assert set(waiting.result(20.0)["prompt"].tolist()) == {5}
    info = table.info()
    assert (info["num_rows"], info["num_discarded"], info["num_incomplete"]) == (0, 16, 0)


def test_sample_when_ranks_share_it_then_old_groups_leave_too(client: tdserve.Client, table: Any) -> None:
    index = table.extend(rollouts(1, 2))
    for _ in range(2):
        client.publish(table.settings.policy, TensorDict({"w": torch.zeros(1)}))
    table.delete(index[:0])
    index = table.extend(rollouts(3, 4))
    table.set_at_("reward", torch.ones(8), index)
    shares = [sample(table, rank=rank, world_size=2) for rank in (0, 1)]
    assert {int(share["prompt"][0]) for share in shares} == {3, 4}
    assert (table.info()["num_discarded"], table.info()["num_pinned"]) == (8, 8)


def test_sample_when_a_consumer_asks_then_groups_stay_for_others(client: tdserve.Client, name: str) -> None:
    policy = f"p-{name}"
    client.publish(policy, TensorDict({"w": torch.zeros(1)}))
    table = client.create_replay(name, rollouts(0)[0], 16, policy=policy)
    table.extend(rollouts(1))
    for _ in range(2):
        client.publish(policy, TensorDict({"w": torch.zeros(1)}))
    with pytest.raises(tdserve.DeadlineExceededError):
        sample(table, consumer="reference", timeout_s=0)
    assert table.info()["num_rows"] == 4
    with pytest.raises(tdserve.DeadlineExceededError):
        sample(table, timeout_s=0)
    assert table.info()["num_rows"] == 0
    client.delete(policy)
