"""The learning rule, without tdserve: Q network, double-DQN loss on n-step transitions, soft target, exploration."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

NUM_HIDDEN = 128
LEARNING_RATE = 1e-3
MAX_GRADIENT_NORM = 10.0

GAMMA = 0.99
NUM_STEPS = 3
"""Steps per transition. Three learn three times as fast as one here; ten are less steady and left seeds at 400."""

TARGET_RATE = 0.02
"""The share of the network that the target takes over per update. The target is also the policy that is published: an
average of many updates acts more steadily than any single one."""

EXPLORED_ROWS = 10_000
"""Transitions over which exploration falls from everything random to the actor's final share."""

FINAL_EPSILONS = (0.0, 0.02)
"""The final share of random actions, by the actor's number in turn. A greedy actor shows what was learned."""


def make_network(num_observations: int, num_actions: int) -> nn.Sequential:
    """Returns a network with a value per action.

    LayerNorm keeps bootstrapped values from running away, and makes inputs of any scale usable.
    """
    return nn.Sequential(
        nn.Linear(num_observations, NUM_HIDDEN), nn.LayerNorm(NUM_HIDDEN), nn.ReLU(),
        nn.Linear(NUM_HIDDEN, NUM_HIDDEN), nn.LayerNorm(NUM_HIDDEN), nn.ReLU(),
        nn.Linear(NUM_HIDDEN, num_actions),
    )  # fmt: skip


def loss(network: nn.Module, target: nn.Module, batch: TensorDictBase) -> Tensor:
    """Returns the loss of double DQN: the network chooses the next action, and the target gives its value."""
    chosen = network(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        observation = batch["next", "observation"]
        action = network(observation).argmax(1, keepdim=True)
        value = target(observation).gather(1, action).squeeze(1)
        expected = batch["next", "reward"] + batch["next", "discount"] * value
    return nn.functional.smooth_l1_loss(chosen, expected)


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module) -> None:
    """Moves the target a little towards the network."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, TARGET_RATE)


def compute_epsilon(num_rows: int, actor: int) -> float:
    """Returns the share of random actions of an actor when all actors together have collected this many transitions."""
    final = FINAL_EPSILONS[actor % len(FINAL_EPSILONS)]
    return final + (1.0 - final) * max(0.0, 1.0 - num_rows / EXPLORED_ROWS)
