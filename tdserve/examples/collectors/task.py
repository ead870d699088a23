"""The task, to learn which of four actions pays for an observation; and the names of the stores of a run."""

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
        """Returns the names in a run."""
        return cls(f"{run}-rows", f"{run}-policy", f"{run}-reports")


def make_policy() -> nn.Sequential:
    """Makes the policy: the logit of every action."""
    return nn.Sequential(nn.Linear(NUM_OBSERVATIONS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_ACTIONS))


@torch.no_grad()
def collect(
    policy: nn.Module, num_rows: int, device: torch.device, *, collector: int = 0, version: int = 0
) -> TensorDict:
    """Lets the policy act in ``num_rows`` situations; returns these, its actions and rewards, on the device."""
    observation = torch.randn(num_rows, NUM_OBSERVATIONS, device=device)
    action = policy(observation).softmax(1).multinomial(1).squeeze(1)
    reward = (action == (observation @ _make_truth().to(device)).argmax(1)).float()
    origin = {"collector": torch.full_like(action, collector), "version": torch.full_like(action, version)}
    return TensorDict({"observation": observation, "action": action, "reward": reward, **origin}, [num_rows])


def make_report(
    collector: int = 0, *, num_rows: int = 0, num_versions: int = 0, seconds: float = 0.0, device: str = "cpu"
) -> TensorDict:
    """Returns a report of a collector, of batch size [1]."""
    counts = {"collector": collector, "num_rows": num_rows, "num_versions": num_versions}
    numbers = {name: torch.tensor([count]) for name, count in counts.items()}
    return TensorDict({**numbers, "seconds": torch.tensor([seconds], dtype=torch.float64), "device": [device]}, [1])


def loss(policy: nn.Module, batch: TensorDictBase) -> Tensor:
    """Makes what paid likelier; rows of older policies serve as well, since they lack only some of what pays."""
    chosen = policy(batch["observation"]).log_softmax(1).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    gained: Tensor = chosen * batch["reward"]
    return -gained.mean()


def _make_truth() -> Tensor:
    return torch.randn(NUM_OBSERVATIONS, NUM_ACTIONS, generator=torch.Generator().manual_seed(0))
