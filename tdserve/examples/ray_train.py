"""A learner of several workers by Ray Train, which draws from a table that several servers share. Needs ``ray[train]``.

``python -m tdserve.examples.ray_train /shared/path`` starts everything; see ``ray_replay`` for the tasks that act.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import tdserve
import tdserve.ray as tdserve_ray
from tdserve.examples.ray_replay import BATCH_SIZE, TABLE, TIMEOUT_S, act, make_step


def learn(config: dict[str, Any]) -> float:
    """Is one worker, which fits the rewards by its part of each batch; returns the last loss."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with tdserve.connect(config["address"]) as client:
        table = client.replay(TABLE, timeout_s=TIMEOUT_S)
        for step in range(config["num_steps"]):
            batch = table.sample(BATCH_SIZE, rank=rank, world_size=world_size, step=step, timeout_s=TIMEOUT_S)
            loss = (model(batch["obs"])[:, 0] - batch["reward"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ray.train.report({"loss": loss.item()})
        return float(loss)


def run(address: str, *, num_actors: int = 2, num_workers: int = 2, num_steps: int = 20) -> float:
    """Runs tasks that act beside the learner; returns the last loss of its first worker."""
    with tdserve.connect(address) as client:
        client.create_replay(TABLE, make_step(), 100_000, min_size=2 * BATCH_SIZE, shards="all", shard_by="episode")
    acting = [ray.remote(num_cpus=0)(act).remote(address, actor) for actor in range(num_actors)]
    scaling = ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 0.5})
    trainer = TorchTrainer(
        learn, train_loop_config={"address": address, "num_steps": num_steps}, scaling_config=scaling
    )
    loss: float = trainer.fit().return_value
    ray.get(acting)
    print(f"loss {loss:.3f} after {num_steps} steps of {num_workers} workers")
    return loss


def main() -> None:
    """Runs it with servers of its own."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    with tdserve_ray.start(2, storage=sys.argv[1], resources={"CPU": 0.5}) as servers:
        run(servers.address)


if __name__ == "__main__":
    main()
