"""The learning rule, free of tdserve: Q network, double-DQN loss on n-step transitions, soft target, exploration."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

NUM_HIDDEN = 128
LEARNING_RATE = 1e-3
MAX_GRADIENT_NORM = 10.0

GAMMA = 0.99
NUM_STEPS = 3
"""Steps per transition: three times as fast as one here, and steadier than ten, which left seeds stuck at 400."""

TARGET_RATE = 0.02
"""Share of the network that the target takes over per update. The target is also the policy that is published: an
average of many updates acts more steadily than any single one."""

EXPLORED_ROWS = 10_000
"""Transitions over which exploration falls from everything random to the actor's final share."""

FINAL_EPSILONS = (0.0, 0.02)
"""Final share of random actions, by the actor's number in turn: a greedy one shows what was learned."""


def make_network(num_observations: int, num_actions: int) -> nn.Sequential:
    """A value per action. LayerNorm keeps bootstrapped values from running away, and inputs of any scale usable."""
    return nn.Sequential(
        nn.Linear(num_observations, NUM_HIDDEN), nn.LayerNorm(NUM_HIDDEN), nn.ReLU(),
        nn.Linear(NUM_HIDDEN, NUM_HIDDEN), nn.LayerNorm(NUM_HIDDEN), nn.ReLU(),
        nn.Linear(NUM_HIDDEN, num_actions),
    )  # fmt: skip


def loss(network: nn.Module, target: nn.Module, batch: TensorDictBase) -> Tensor:
    """Double DQN: the network chooses the next action, the target says what it is worth."""
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


def epsilon(num_rows: int, actor: int) -> float:
    """Share of random actions of an actor, when so many transitions have been collected by all."""
    final = FINAL_EPSILONS[actor % len(FINAL_EPSILONS)]
    return final + (1.0 - final) * max(0.0, 1.0 - num_rows / EXPLORED_ROWS)
