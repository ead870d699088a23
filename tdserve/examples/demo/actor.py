"""An actor process: steps environments with the newest policy, and sends what happened to the server."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from tensordict import TensorDict

import tdserve
from tdserve.examples.demo.dqn import epsilon, make_network
from tdserve.examples.demo.options import DemoOptions, parse
from tdserve.examples.demo.processes import end_with_parent
from tdserve.examples.demo.rollout import Actions, Observations, Rollout, to_tensordict
from tdserve.examples.demo.stores import PATIENCE_S, POLICY, WARMUP_ROWS, open_stores, sizes

NUM_ENVS = 4
STEPS_PER_VERSION = 8
"""Steps of every environment with one policy. With the learner's updates per version this fixes how often a transition
is learned from, however fast the machine is: nobody outruns the other."""

WARMUP_CALLS = WARMUP_ROWS // (NUM_ENVS * STEPS_PER_VERSION)
"""Of ``Actor.act``, before there is a policy."""


class Actor:
    """Steps environments and sends transitions and finished episodes.

    Args:
        client: An open client, the caller's.
        options: Environment, seed and number of this actor.

    Attributes:
        version: Of the policy that it follows; 0 before the first.
        is_over: Whether the learner has said with that version that it was its last.
        num_sent: Transitions.
    """

    def __init__(self, client: tdserve.Client, options: DemoOptions) -> None:
        self._client = client
        self._index = options.index
        self._stores = open_stores(client, options.env)
        self._rollout = Rollout(options.env, NUM_ENVS, np.random.default_rng([options.seed, options.index]))
        self._network = make_network(*sizes(options.env))
        # shares the network's memory: what is received into it is what the network computes with
        self._parameters = TensorDict.from_module(self._network).data
        self.version = 0
        self.is_over = False
        self.num_sent = 0

    def look(self) -> None:
        """Takes the newest policy if there is one."""
        self._take(0.0)

    def follow_policy(self, timeout_s: float | None = None) -> float:
        """Waits for a newer policy and takes it. Returns the share of random actions to go with it."""
        return self._take(PATIENCE_S if timeout_s is None else timeout_s)

    def _take(self, timeout_s: float) -> float:
        policy = self._client.latest(POLICY, newer_than=self.version, timeout_s=timeout_s, out=self._parameters)
        if policy is None:  # only when asked without waiting
            return 1.0
        self.version = policy.version
        self.is_over = bool(policy.metadata.get("is_over"))
        return epsilon(policy.metadata["num_transitions"], self._index)

    def act(self, exploration: float) -> None:
        """Takes a few steps and sends what happened; ``exploration`` is the share of random actions."""
        transitions, returns = self._rollout.collect(STEPS_PER_VERSION, self._greedy, epsilon=exploration)
        if transitions:
            self._stores.transitions.extend(to_tensordict(transitions, policy_version=self.version))
            self.num_sent += len(transitions)
        if returns:
            self._stores.episodes.extend(self._episodes(returns))

    @torch.no_grad()
    def _greedy(self, observations: Observations) -> Actions:
        return np.asarray(self._network(torch.from_numpy(observations)).argmax(1))

    def _episodes(self, returns: list[float]) -> TensorDict:
        num_rows = len(returns)
        return TensorDict(
            {
                "actor": torch.full((num_rows,), self._index),
                "episode_return": torch.tensor(returns),
                "policy_version": torch.full((num_rows,), self.version),
                "ended_s": torch.full((num_rows,), time.time(), dtype=torch.float64),
            },
            [num_rows],
        )


def act(options: DemoOptions) -> int:
    """Acts until ``max_seconds`` are over or SIGTERM comes. Returns the exit code."""
    torch.set_num_threads(1)
    deadline_s = time.monotonic() + options.max_seconds
    with options.connect() as client:
        actor = Actor(client, options)
        for _ in range(WARMUP_CALLS):
            actor.act(exploration=1.0)
        while time.monotonic() < deadline_s:
            actor.act(actor.follow_policy())
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(act(parse("actor")))
