"""The learner process: samples transitions, improves the network, publishes the policy."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import tdserve
from tdserve.examples.demo.dqn import LEARNING_RATE, MAX_GRADIENT_NORM, follow, loss, make_network
from tdserve.examples.demo.options import DemoOptions, parse
from tdserve.examples.demo.processes import end_with_parent
from tdserve.examples.demo.stores import PATIENCE_S, POLICY, open_stores, sizes

BATCH_SIZE = 256
UPDATES_PER_VERSION = 16
"""Updates between two published policies: with two actors' 32 rows each per version, a row is learned from 64 times."""

MIN_TRANSITIONS_PER_UPDATE = 2
"""The learner waits for slower actors rather than learn the same rows by heart."""


class Learner:
    """Improves a policy and publishes it.

    Args:
        client: An open client, the caller's.
        options: Environment and seed.

    Attributes:
        transitions: Where its samples come from.
        num_updates: So far.
        num_transitions: Written by all actors when it last looked.
    """

    def __init__(self, client: tdserve.Client, options: DemoOptions) -> None:
        torch.manual_seed(options.seed)
        self._client = client
        self._network = make_network(*sizes(options.env))
        self._target = copy.deepcopy(self._network)
        self._optimizer = torch.optim.Adam(self._network.parameters(), LEARNING_RATE, fused=True)
        self._error = 0.0
        self.transitions = open_stores(client, options.env).transitions
        self.num_updates = 0
        self.num_transitions = 0

    def batches(self, *, timeout_s: float = PATIENCE_S) -> tdserve.Batches | tdserve.TakenBatches:
        """Samples for ``step``; the caller closes it. A wait for rows ends after ``timeout_s``."""
        return self.transitions.batches(BATCH_SIZE, prefetch=4, timeout_s=timeout_s)

    def step(self, batches: tdserve.Batches | tdserve.TakenBatches, **progress: Any) -> None:
        """Makes a few updates and publishes what came of them, with further ``progress`` beside; or lets slower actors
        catch up for a moment.

        Raises:
            TDServeError: The server did not answer, or no rows came. The updates made so far stay.
        """
        self.num_transitions = self.transitions.info()["inserts"]
        if self.num_transitions < self.num_updates * MIN_TRANSITIONS_PER_UPDATE:
            time.sleep(0.005)
            return
        for batch in itertools.islice(batches, UPDATES_PER_VERSION):
            self._error = update(self._network, self._target, self._optimizer, batch=batch)
            self.num_updates += 1
        self.publish(**progress)

    def publish(self, **progress: Any) -> int:
        """Publishes the policy as it is now; returns its version."""
        told = {"num_updates": self.num_updates, "num_transitions": self.num_transitions, "loss": self._error}
        version: int = self._client.publish(POLICY, TensorDict.from_module(self._target), metadata={**told, **progress})
        return version

    def resume(self, policy: tdserve.Weights) -> None:
        """Goes on from a published policy."""
        for network in (self._network, self._target):
            TensorDict.from_module(network).data.update_(policy.data)
        self.num_updates = policy.metadata["num_updates"]
        self.num_transitions = policy.metadata["num_transitions"]


def learn(options: DemoOptions) -> int:
    """Learns until ``max_seconds`` are over or SIGTERM comes. Returns the exit code."""
    torch.set_num_threads(1)
    deadline_s = time.monotonic() + options.max_seconds
    with options.connect() as client:
        learner = Learner(client, options)
        with learner.batches() as batches:
            while time.monotonic() < deadline_s:
                learner.step(batches)
    return 0


def update(network: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, *, batch: TensorDictBase) -> float:
    """Improves the network on one batch, and lets the target follow. Returns the loss."""
    optimizer.zero_grad()
    error = loss(network, target, batch)
    error.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    follow(target, network)
    return error.item()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(learn(parse("learner")))
