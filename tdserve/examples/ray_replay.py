"""Ray tasks act, and an actor of Ray learns, through a table that several servers share. Needs ``ray``.

``python -m tdserve.examples.ray_replay /shared/path`` starts two servers in the Ray cluster that it finds, or in one
that it starts on this machine; the path must be one that all nodes share, or be on each node's own disk.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch
from tensordict import TensorDict

import tdserve
import tdserve.ray as tdserve_ray

TABLE = "steps"
NUM_EPISODES, EPISODE_STEPS, BATCH_SIZE = 4, 50, 64
TIMEOUT_S = 60.0


def make_step() -> TensorDict:
    """Makes a row, as an example of all others."""
    return TensorDict({"obs": torch.zeros(4), "reward": torch.zeros(()), "episode": torch.zeros((), dtype=torch.int64)})


def act(address: str, actor: int) -> int:
    """Writes episodes, in the place of an environment and a policy; returns the number of steps."""
    with tdserve.connect(address) as client:
        table = client.replay(TABLE, timeout_s=TIMEOUT_S)
        for episode in range(NUM_EPISODES):
            number = torch.full((EPISODE_STEPS,), actor * NUM_EPISODES + episode)
            obs, reward = torch.randn(EPISODE_STEPS, 4), torch.rand(EPISODE_STEPS)
            steps = TensorDict({"obs": obs, "reward": reward, "episode": number}, [EPISODE_STEPS])
            table.extend(steps)  # an episode stays on one server, which shard_by chooses
        return NUM_EPISODES * EPISODE_STEPS


class RayLearner:
    """Draws batches of what all actors have written."""

    def __init__(self, address: str) -> None:
        self._client = tdserve.connect(address)

    def learn(self, num_batches: int) -> float:
        """Returns the mean reward of some batches, in the place of an update."""
        table = self._client.replay(TABLE, timeout_s=TIMEOUT_S)
        with table.batches(BATCH_SIZE, prefetch=2) as batches:
            rewards = [next(batches)["reward"].mean() for _ in range(num_batches)]
        return float(torch.stack(rewards).mean())


def run(address: str, *, num_actors: int = 4, num_batches: int = 20) -> float:
    """Runs tasks that act beside an actor of Ray that learns; returns the mean reward that it has seen."""
    with tdserve.connect(address) as client:
        client.create_replay(TABLE, make_step(), 100_000, min_size=BATCH_SIZE, shards="all", shard_by="episode")
    act_in_task, make_learner = ray.remote(num_cpus=0)(act), ray.remote(num_cpus=0)(RayLearner)
    acting = [act_in_task.remote(address, actor) for actor in range(num_actors)]
    learner: Any = make_learner.remote(address)
    mean: float = ray.get(learner.learn.remote(num_batches))
    num_steps = sum(ray.get(acting))
    print(f"{num_steps} steps of {num_actors} actors; {num_batches} batches with a mean reward of {mean:.3f}")
    return mean


def main() -> None:
    """Runs it with servers of its own."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    with tdserve_ray.start(2, storage=sys.argv[1], resources={"CPU": 0.5}) as servers:
        run(servers.address)


if __name__ == "__main__":
    main()
