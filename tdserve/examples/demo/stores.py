"""What the processes of the demo share: two replays and one policy, by name.

Every process opens them with ``exists_ok=True``, so that they may start, and start again, in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import NotSupportedError

POLICY = "policy"

TRANSITIONS_CAPACITY = 50_000
"""Rows. Small enough that what early, random policies did is overwritten: n-step returns are only true on-policy."""

EPISODES_CAPACITY = 20_000
"""Rows. Many more than a run has, so that the row number is the episode's number."""

MIN_ROWS = 256
"""Transitions that learning waits for."""

WARMUP_ROWS = 2 * MIN_ROWS
"""Steps that each actor takes at random before it waits for a first policy: enough for learning to begin, although the
last steps of unfinished episodes have not been joined and sent yet."""

PATIENCE_S = 60.0
"""Seconds that actors and learner wait for one another; who needs longer is gone."""


class EnvironmentSizes(NamedTuple):
    """What the network has to know of an environment."""

    num_observations: int
    num_actions: int


class DemoStores(NamedTuple):
    """The two replays; the policy has no handle, it is published and fetched by name."""

    transitions: tdserve.ReplayHandle
    episodes: tdserve.ReplayHandle


def sizes(env: str) -> EnvironmentSizes:
    """Observation and action sizes of an environment, by its gymnasium name.

    Raises:
        NotSupportedError: It is unknown, its observations are not flat, or its actions not discrete.
    """
    try:
        made = gymnasium.make(env)
    except gymnasium.error.Error as fault:
        raise NotSupportedError(feature=f"environment {env!r}", reason=str(fault)) from fault
    seen, actions = made.observation_space, made.action_space
    made.close()
    if not isinstance(seen, Box) or len(seen.shape) != 1 or not isinstance(actions, Discrete):
        raise NotSupportedError(feature=f"environment {env!r}", reason="not flat Box observations and Discrete actions")
    return EnvironmentSizes(seen.shape[0], int(actions.n))


def open_stores(client: tdserve.Client, env: str) -> DemoStores:
    """Opens the replays of a run, made by whichever process comes first."""
    observation = torch.zeros(sizes(env).num_observations)
    transition = TensorDict(
        {
            "observation": observation,
            "action": torch.tensor(0),
            "policy_version": torch.tensor(0),
            "next": {
                "observation": observation,  # n steps later
                "reward": torch.tensor(0.0),  # discounted sum of the n rewards
                "discount": torch.tensor(0.0),  # gamma**n; 0 where the episode terminated, not where it was cut short
            },
        }
    )
    episode = TensorDict(
        {
            "actor": torch.tensor(0),
            "episode_return": torch.tensor(0.0),
            "policy_version": torch.tensor(0),
            "ended_s": torch.tensor(0.0, dtype=torch.float64),  # since the epoch
        }
    )
    return DemoStores(
        client.create_replay(
            "transitions", like=transition, capacity=TRANSITIONS_CAPACITY, min_size=MIN_ROWS, exists_ok=True
        ),
        client.create_replay("episodes", like=episode, capacity=EPISODES_CAPACITY, exists_ok=True),
    )
