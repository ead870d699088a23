"""An actor: steps environments with the newest policy, and sends to the server what happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import DeadlineExceededError, TransportError
from tdserve.examples.demo.demo_options import DemoOptions, parse
from tdserve.examples.demo.demo_stores import PATIENCE_S, POLICY, WARMUP_ROWS, get_sizes, open_stores
from tdserve.examples.demo.dqn import compute_epsilon, make_network
from tdserve.examples.demo.processes import end_with_parent
from tdserve.examples.demo.rollout import Actions, Observations, Rollout, to_episode_rows, to_transition_rows

NUM_ENVS = 4
STEPS_PER_VERSION = 8
"""Steps of every environment with one policy. Together with the learner's updates per version, this fixes how often a
transition is learned from, however fast the machine is: neither side outruns the other."""

GONE_S = 300.0
"""After this long without an answer or a newer policy, the server or the learner will not come back by itself."""

WARMUP_CALLS = WARMUP_ROWS // (NUM_ENVS * STEPS_PER_VERSION)
"""Calls of ``Actor.act`` before there is a policy."""


class Actor:
    """Steps environments and sends transitions and finished episodes.

    Args:
        client: An open client, the caller's.
        options: Environment, seed and number of this actor.

    Attributes:
        version: The version of the policy that it follows; 0 before the first.
        is_over: Whether the learner published that version as its last.
        num_sent: The number of transitions sent.
    """

    def __init__(self, client: tdserve.Client, options: DemoOptions) -> None:
        self._client = client
        self._index = options.index
        self._stores = open_stores(client, options.env)
        self._rollout = Rollout(options.env, NUM_ENVS, np.random.default_rng([options.seed, options.index]))
        self._network = make_network(*get_sizes(options.env))
        # shares the network's memory: what is received into it is what the network computes with
        self._parameters = TensorDict.from_module(self._network).data
        self.version = 0
        self.is_over = False
        self.num_sent = 0

    def follow_policy(self, timeout_s: float) -> float:
        """Waits for a newer policy and takes it. With 0 seconds, takes one only if it is there.

        Returns:
            The share of random actions that goes with the policy; 1 where there was none.
        """
        policy = self._client.latest(POLICY, newer_than=self.version, timeout_s=timeout_s, out=self._parameters)
        if policy is None:
            return 1.0
        self.version = policy.version
        self.is_over = bool(policy.metadata.get("is_over"))
        return compute_epsilon(policy.metadata["num_transitions"], self._index)

    def act(self, exploration: float) -> None:
        """Takes a few steps and sends what happened; ``exploration`` is the share of random actions."""
        transitions, returns = self._rollout.collect(STEPS_PER_VERSION, self._choose_greedily, epsilon=exploration)
        if transitions:
            self._stores.transitions.extend(to_transition_rows(transitions, policy_version=self.version))
            self.num_sent += len(transitions)
        if returns:
            rows = to_episode_rows(returns, actor=self._index, policy_version=self.version, ended_s=time.time())
            self._stores.episodes.extend(rows)

    @torch.no_grad()
    def _choose_greedily(self, observations: Observations) -> Actions:
        return np.asarray(self._network(torch.from_numpy(observations)).argmax(1))


def act(options: DemoOptions) -> int:
    """Acts until the learner says that the run is over, or until ``max_seconds`` and a minute are over.

    Whatever happens to the server or the network, the client's calls continue as soon as they are back.

    Returns:
        The exit code: 0.

    Raises:
        TDServeError: The server or the learner has been gone for five minutes, or the server refuses this actor.
    """
    torch.set_num_threads(1)

    def say(line: str) -> None:
        print(f"actor {options.index}: {line}", flush=True)

    say(f"connects to {options.address}")
    with options.connect(timeout_s=GONE_S) as client:
        actor = Actor(client, options)
        ending, wait_s = "no other run has begun", PATIENCE_S
        if POLICY in client:
            actor.follow_policy(GONE_S)
        while not actor.is_over or _wait_for_next_run(actor, wait_s, say):
            ending, wait_s = _act(actor, options.max_seconds), options.linger_s
            if not actor.is_over:
                break
    say(f"{ending}; {actor.num_sent:,} transitions sent, policy version {actor.version}")
    return 0


def _wait_for_next_run(actor: Actor, wait_s: float, say: Callable[[str], None]) -> bool:
    """Waits for another run and returns whether one began. With 0 seconds it does not wait."""
    if wait_s:
        say(f"the run is over; stays {wait_s:g} s for another one")
        with suppress(TransportError, DeadlineExceededError):  # no learner began one, or the server went away
            actor.follow_policy(wait_s)
    return not actor.is_over


def _act(actor: Actor, max_seconds: float) -> str:
    """Acts; returns why it has ended."""
    for _ in range(WARMUP_CALLS):
        actor.act(exploration=1.0)
    end_s = time.monotonic() + max_seconds + PATIENCE_S
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            exploration = actor.follow_policy(min(left_s, GONE_S))
        except (TransportError, DeadlineExceededError):
            if left_s > GONE_S:
                raise
            break
        if actor.is_over:
            return "the learner says that it is over"
        actor.act(exploration)
    return "the time is up"


if __name__ == "__main__":
    end_with_parent()
    sys.exit(act(parse(sys.argv[1:])))
