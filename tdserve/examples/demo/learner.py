"""The learner: samples transitions, improves the network, publishes the policy.

``learn`` is a process of the whole demo. ``learn_alone`` is ``tdserve demo --role learner``: it also watches the run
and prints the result.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from torch import nn

import tdserve
from tdserve.base.errors import DeadlineExceededError
from tdserve.examples.demo.checksum import Checksum, checksum
from tdserve.examples.demo.dqn import LEARNING_RATE, MAX_GRADIENT_NORM, follow, loss, make_network
from tdserve.examples.demo.options import DemoOptions, parse
from tdserve.examples.demo.patience import BORNE, Patience
from tdserve.examples.demo.processes import end_with_parent
from tdserve.examples.demo.report import Ending, Goal, ProgressDisplay, Result, print_summary, summary, write_json
from tdserve.examples.demo.stores import PATIENCE_S, POLICY, DemoStores, open_stores, sizes
from tdserve.examples.demo.watch import Begun, Watch

BATCH_SIZE = 256
UPDATES_PER_VERSION = 16
"""Updates between two published policies. With two actors that write 32 rows each per version, the learner learns from
each row 64 times."""

MIN_TRANSITIONS_PER_UPDATE = 2
"""Below this the learner waits for slower actors; otherwise it would learn the same rows by heart."""


class Learner:
    """Improves a policy and publishes it.

    Args:
        client: An open client, the caller's.
        options: Environment and seed.

    Attributes:
        transitions: The store that its samples come from.
        num_updates: The number of updates so far.
        num_transitions: The rows written by all actors when it last looked.
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
        """Returns samples for ``step``; the caller closes them. A wait for rows ends after ``timeout_s``."""
        return self.transitions.batches(BATCH_SIZE, prefetch=4, timeout_s=timeout_s)

    def step(self, batches: tdserve.Batches | tdserve.TakenBatches, **progress: Any) -> None:
        """Makes a few updates and publishes the policy with further ``progress``, or waits a moment for slower actors.

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
        """Publishes the policy as it is now, and returns its version."""
        figures = {"num_updates": self.num_updates, "num_transitions": self.num_transitions, "loss": self._error}
        version: int = self._client.publish(
            POLICY, TensorDict.from_module(self._target), metadata={**figures, **progress}
        )
        return version

    def resume(self, policy: tdserve.Weights) -> None:
        """Continues from a published policy."""
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
    """Improves the network on one batch, lets the target follow, and returns the loss."""
    optimizer.zero_grad()
    error = loss(network, target, batch)
    error.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    follow(target, network)
    return error.item()


GONE_S = 120.0
"""A server that has not answered for this long will not come back by itself."""

ROWS_TIMEOUT_S = 2.0
"""How long samples wait for rows. There may be no actor; progress and the end of the time are shown all the same."""

POLL_INTERVAL_S = 1.0

QUIET_S = 1.0
"""When nothing was written for this long, the actors know that the run is over."""

QUIET_TIMEOUT_S = 15.0
"""The longest wait for the last rows of an actor that itself waits for a server or a network."""


def learn_alone(options: DemoOptions) -> int:
    """Learns until the mean return is high enough or ``max_seconds`` are over, and prints the result.

    When another learner has begun a run and not ended it, this one continues it from the last published policy.

    Returns:
        The exit code: 0.

    Raises:
        TDServeError: The server has been gone for two minutes, or refuses this learner.
        OSError: The figures cannot be written.
    """
    torch.set_num_threads(1)
    console = Console()

    def say(line: str) -> None:
        console.print(f"learner: {line}", soft_wrap=True, highlight=False, markup=False)

    say(f"connects to {options.server_address}")
    patience = Patience(GONE_S, say=say)
    goal = Goal.of(options)
    with options.connect(timeout_s=PATIENCE_S) as client:
        stores = patience.call(lambda: open_stores(client, options.env))
        learner = patience.call(lambda: Learner(client, options))
        begun, line = patience.call(lambda: _begin(client, learner, stores))
        say(line)
        watch = Watch(client, stores, begun)
        with ProgressDisplay(console, title=options.title, target=goal.target) as progress:
            ending = _learn(learner, watch, progress, patience, goal=goal, begun=begun)
        patience.call(lambda: learner.publish(is_over=True, **_said(watch, begun)))
        found = patience.call(lambda: _checksum_of_quiet(stores.transitions))
        patience.call(watch.poll)
    result = Result(options, goal.target, ending.reason, watch.newest, watch.episodes)
    if options.json_path is not None:
        write_json(result, options.json_path)
    print_summary(console, summary(result))
    console.print(f"data checksum: {found}", soft_wrap=True, highlight=False)
    return ending.exit_code


def _begin(client: tdserve.Client, learner: Learner, stores: DemoStores) -> tuple[Begun, str]:
    """Continues the run of the newest policy, or begins one, and tells the actors at once; returns it with a line."""
    policy = client.latest(POLICY, newer_than=0, timeout_s=0)
    begun = Begun.now(client, stores)
    line = "begins"
    if policy is not None:
        learner.resume(policy)
        line = f"begins a new run with the policy of version {policy.version}"
        if not policy.metadata.get("is_over"):
            begun = Begun(*(policy.metadata.get(name, 0) for name in Begun._fields))
            line = f"goes on from version {policy.version}, {begun.seconds:.0f} s into the run"
    learner.publish(is_over=False, **begun._asdict())
    return begun, line


def _learn(
    learner: Learner, watch: Watch, progress: ProgressDisplay, patience: Patience, *, goal: Goal, begun: Begun
) -> Ending:
    polled_s = -POLL_INTERVAL_S
    with learner.batches(timeout_s=ROWS_TIMEOUT_S) as batches:
        while True:
            if time.monotonic() - polled_s >= POLL_INTERVAL_S:
                patience.call(watch.poll)
                polled_s = time.monotonic()
                progress.show(watch.newest, watch.rates)
                ending = goal.ending(watch.newest)
                if ending is not None:
                    return ending
            try:
                learner.step(batches, is_over=False, **_said(watch, begun))
            except DeadlineExceededError:
                continue  # no rows yet; the next poll shows whether the server still answers
            except BORNE as error:
                patience.bear(error)


def _said(watch: Watch, begun: Begun) -> dict[str, float]:
    """Returns what each published policy says, for a learner that continues the run."""
    return begun._replace(seconds=watch.seconds)._asdict()


def _checksum_of_quiet(replay: tdserve.ReplayHandle) -> Checksum:
    """Returns the checksum once nothing is written any more."""
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    num_rows = -1
    while num_rows != (now := replay.info()["inserts"]) and time.monotonic() < deadline_s:
        num_rows = now
        time.sleep(QUIET_S)
    return checksum(replay)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(learn(parse("learner")))
