"""The learner process: samples transitions, improves the network, publishes the policy."""

from __future__ import annotations

import copy
import itertools
import sys
import time

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


def learn(options: DemoOptions) -> int:
    """Learns until ``max_seconds`` are over or SIGTERM comes. Returns the exit code."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    deadline_s = time.monotonic() + options.max_seconds
    network = make_network(*sizes(options.env))
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    with tdserve.connect(options.server_address, transport=options.transport) as client:
        transitions = open_stores(client, options.env).transitions
        with transitions.batches(BATCH_SIZE, prefetch=4, timeout_s=PATIENCE_S) as batches:
            num_updates = 0
            while time.monotonic() < deadline_s:
                num_transitions = transitions.info()["inserts"]
                if num_transitions < num_updates * MIN_TRANSITIONS_PER_UPDATE:
                    time.sleep(0.005)
                    continue
                for batch in itertools.islice(batches, UPDATES_PER_VERSION):
                    error = update(network, target, optimizer, batch=batch)
                num_updates += UPDATES_PER_VERSION
                progress = {"num_updates": num_updates, "num_transitions": num_transitions, "loss": error}
                client.publish(POLICY, TensorDict.from_module(target), metadata=progress)
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
