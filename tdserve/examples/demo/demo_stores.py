"""What the processes of the demo share: two replays and one policy, by name.

Every process opens them with ``exists_ok=True``, so that they may start, and start again, in any order.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

import tdserve
from tdserve.base.errors import NotSupportedError
from tdserve.examples.demo.rollout import Transition, to_episode_rows, to_transition_rows

POLICY = "policy"

TRANSITIONS_CAPACITY = 50_000
"""Rows. Small enough that what early, random policies did is overwritten: n-step returns are only true on-policy."""

EPISODES_CAPACITY = 20_000
"""Rows. Many more than a run has, so that the row number is the episode's number."""

MIN_ROWS = 256
"""Transitions that learning waits for."""

WARMUP_ROWS = 2 * MIN_ROWS
"""Steps that each actor takes at random before it waits for a first policy. Learning can begin with them, although the
last steps of unfinished episodes have not been joined and sent yet."""

PATIENCE_S = 60.0
"""Seconds that actors and learner wait for one another. A process that needs longer is gone."""


class DemoStores(NamedTuple):
    """The two replays. The policy has no handle: it is published and fetched by name."""

    transitions: tdserve.ReplayHandle
    episodes: tdserve.ReplayHandle


def get_sizes(env: str) -> tuple[int, int]:
    """Returns the numbers of observations and of actions of an environment, by its gymnasium name.

    Raises:
        NotSupportedError: The environment is unknown, its observations are not flat, or its actions are not discrete.
    """
    try:
        made = gymnasium.make(env)
    except gymnasium.error.Error as fault:
        raise NotSupportedError(feature=f"environment {env!r}", reason=str(fault)) from fault
    seen, actions = made.observation_space, made.action_space
    made.close()
    if not isinstance(seen, Box) or len(seen.shape) != 1 or not isinstance(actions, Discrete):
        raise NotSupportedError(feature=f"environment {env!r}", reason="not flat Box observations and Discrete actions")
    return seen.shape[0], int(actions.n)


def open_stores(client: tdserve.Client, env: str) -> DemoStores:
    """Opens the replays of a run; the process that comes first makes them."""
    observation = np.zeros(get_sizes(env)[0], np.float32)
    transitions = to_transition_rows([Transition(observation, 0, observation, 0.0, 0.0)], policy_version=0)
    episodes = to_episode_rows([0.0], actor=0, policy_version=0, ended_s=0.0)
    return DemoStores(
        client.create_replay(
            "transitions", like=transitions[0], capacity=TRANSITIONS_CAPACITY, min_size=MIN_ROWS, exists_ok=True
        ),
        client.create_replay("episodes", like=episodes[0], capacity=EPISODES_CAPACITY, exists_ok=True),
    )


def compute_checksum(replay: tdserve.ReplayHandle) -> str:
    """Returns a checksum of all rows of a replay, as clients read them: it tells whether the content has changed.

    Raises:
        TDServeError: The rows could not be read.
    """
    found, num_rows = 0, len(replay)
    if num_rows:
        rows = replay[:num_rows]
        for key in sorted(rows.keys(True, True), key=str):
            found = zlib.crc32(rows[key].contiguous().numpy().tobytes(), found)
    return f"crc32 {found:08x} over {num_rows} rows"
