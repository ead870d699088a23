"""What is learned: which of four actions pays for what is seen. And the stores that a run shares, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

NUM_OBSERVATIONS = 8
NUM_ACTIONS = 4
NUM_HIDDEN = 64

PATIENCE_S = 60.0
"""Seconds that processes wait for one another, which all import torch when they start."""


class Names(NamedTuple):
    """The stores of a run. Names of its own let several runs share a server."""

    rows: str  # replay: what the collectors saw and did
    policy: str  # weights
    reports: str  # queue: a row from every collector when it begins, and one when it has ended

    @classmethod
    def of(cls, run: str) -> Names:
        """The names in a run."""
        return cls(f"{run}-rows", f"{run}-policy", f"{run}-reports")


def make_policy() -> nn.Sequential:
    """The logit of every action."""
    return nn.Sequential(nn.Linear(NUM_OBSERVATIONS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_ACTIONS))


def row() -> TensorDict:
    """One row of a run."""
    return TensorDict(
        {
            "observation": torch.zeros(NUM_OBSERVATIONS),
            "action": torch.tensor(0),
            "reward": torch.tensor(0.0),
            "collector": torch.tensor(0),
            "version": torch.tensor(0),  # of the policy that acted
        }
    )


def report() -> TensorDict:
    """What a collector says of itself."""
    numbers = {name: torch.tensor(0) for name in ("collector", "num_rows", "num_versions")}
    return TensorDict({**numbers, "seconds": torch.tensor(0.0, dtype=torch.float64), "device": "cpu"})


@torch.no_grad()
def collect(policy: nn.Module, num_rows: int, device: torch.device) -> TensorDict:
    """What the policy does in so many situations, and what it gets for it: [num_rows], on the device."""
    observation = torch.randn(num_rows, NUM_OBSERVATIONS, device=device)
    action = policy(observation).softmax(1).multinomial(1).squeeze(1)
    best = (observation @ _truth().to(device)).argmax(1)
    return TensorDict(
        {"observation": observation, "action": action, "reward": (action == best).float()}, [num_rows], device=device
    )


def loss(policy: nn.Module, batch: TensorDictBase) -> Tensor:
    """Makes what paid likelier; rows of older policies serve as well, since they lack only some of what pays."""
    chosen = policy(batch["observation"]).log_softmax(1).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    gained: Tensor = chosen * batch["reward"]
    return -gained.mean()


def _truth() -> Tensor:
    return torch.randn(NUM_OBSERVATIONS, NUM_ACTIONS, generator=torch.Generator().manual_seed(0))
