"""One rank of a data-parallel job that uses tdserve before, beside and after its own process group.

``python -m tests.integration.data_parallel RANK STORE_PORT ADDRESS TRANSPORT`` prints JSON: what it has seen. With ""
for an address it does without tdserve. A process makes only one group: making another one fails now and then in torch
itself (also without tdserve).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdserve
from tdserve.base.config import check_transport

WORLD_SIZE = 2
NUM_STEPS = 150
NUM_ROWS = 32
NUM_FLOATS = 16


class Use:
    """What a rank does with tdserve in every step."""

    def __init__(self, client: tdserve.Client, rank: int) -> None:
        like = TensorDict({"x": torch.zeros(NUM_FLOATS), "rank": torch.tensor(0)})
        self._client = client
        self._rank = rank
        self._replay = client.create_replay("rows", like=like, capacity=10_000, exists_ok=True)
        self._seen = 0
        self.num_pulled = 0

    def __call__(self, x: torch.Tensor, model: nn.Module) -> None:
        rows = TensorDict({"x": x, "rank": torch.full((NUM_ROWS,), self._rank)}, [NUM_ROWS])
        self._replay.extend(rows)
        assert self._replay.sample(NUM_ROWS)["x"].shape == (NUM_ROWS, NUM_FLOATS)
        self._client.publish(f"policy-{self._rank}", model)
        other = f"policy-{1 - self._rank}"
        newest = self._client.latest(other, newer_than=self._seen, timeout_s=None if not self._seen else 0)
        if newest is not None:
            self._seen = newest.version
            self.num_pulled += 1


def make_network() -> nn.Module:
    """What is trained, and published."""
    return nn.Sequential(nn.Linear(NUM_FLOATS, 64), nn.ReLU(), nn.Linear(64, 1))


def train(rank: int, use: Use | None) -> dict[str, Any]:
    """A training from its beginning to its end, with a default group of its own."""
    before = dict(os.environ)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(7)
    network = make_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    torch.manual_seed(100 + rank)
    digest = hashlib.sha256()
    for _ in range(NUM_STEPS):
        x = torch.randn(NUM_ROWS, NUM_FLOATS)  # from the global generator: the test notices if somebody else draws from
        # it
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
        if use is not None:
            use(x, network)
    for parameter in network.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    seen = {
        "result": digest.hexdigest(),
        "loss": loss.item(),
        "generators": [torch.rand(1).item(), float(np.random.rand()), random.random()],
        "is_same_group": dist.group.WORLD is group and dist.get_world_size() == WORLD_SIZE == total.item(),
        "num_groups": len(dist.distributed_c10d._world.pg_map),
        "is_same_environment": dict(os.environ) == before,
    }
    dist.barrier()  # gloo does not end well when the other rank is gone already
    del model, group
    dist.destroy_process_group()
    return seen


def main(rank: int, store_port: int, address: str, transport: str) -> None:
    """See the module."""
    torch.set_num_threads(1)
    # As torchrun does; the store is the test's.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store_port),
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    report: dict[str, Any]
    if not address:
        report = {"training": train(rank, None)}
    else:
        before = dict(os.environ)
        with tdserve.connect(address, transport=check_transport(transport), timeout_s=60.0) as client:
            use = Use(client, rank)
            use(torch.zeros(NUM_ROWS, NUM_FLOATS), make_network())
            first = {"is_initialized": dist.is_initialized(), "is_same_environment": dict(os.environ) == before}
            training = train(rank, use)
            use(torch.ones(NUM_ROWS, NUM_FLOATS), make_network())
            report = {
                "first": first,
                "training": training,
                "is_initialized_after": dist.is_initialized(),
                "num_pulled": use.num_pulled,
                "transport": client.stats()["transport"],
            }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
