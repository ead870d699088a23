"""The learner: samples transitions, improves the network, publishes the policy, and shows how the run goes."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from torch import nn

import tdserve
from tdserve.base.errors import DeadlineExceededError, ServerBusyError, TransportError
from tdserve.cli.screen.render import print_json
from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_stores import POLICY, compute_checksum, get_sizes, open_stores
from tdserve.examples.demo.dqn import LEARNING_RATE, MAX_GRADIENT_NORM, follow, loss, make_network
from tdserve.examples.demo.run_display import open_display
from tdserve.examples.demo.run_report import (
    Ending,
    Result,
    describe_run,
    find_ending,
    print_summary,
    summarize,
    write_json,
)
from tdserve.examples.demo.watch import Begun, RunWatch

BATCH_SIZE = 256
UPDATES_PER_VERSION = 16
"""Updates between two published policies. With two actors that write 32 rows each per version, the learner learns from
each row 64 times."""

MIN_TRANSITIONS_PER_UPDATE = 2
"""Below this the learner waits for slower actors; otherwise it would learn the same rows by heart."""

GONE_S = 120.0
"""A server that has not answered for this long will not come back by itself."""

ROWS_TIMEOUT_S = 2.0
"""How long samples wait for rows. There may be no actor; progress and the end of the time are shown all the same."""

POLL_INTERVAL_S = 0.5

QUIET_S = 1.0
"""When nothing was written for this long, the actors know that the run is over."""

QUIET_TIMEOUT_S = 15.0
"""The longest wait for the last rows of an actor that itself waits for a server or a network."""


class Learner:
    """Improves a policy and publishes it.

    Args:
        client: An open client, the caller's.
        options: Environment and seed.

    Attributes:
        stores: The replays of the run.
        num_updates: The number of updates so far.
        num_transitions: The rows written by all actors when it last looked.
    """

    def __init__(self, client: tdserve.Client, options: DemoOptions) -> None:
        torch.manual_seed(options.seed)
        self._client = client
        self._network = make_network(*get_sizes(options.env))
        self._target = copy.deepcopy(self._network)
        self._optimizer = torch.optim.Adam(self._network.parameters(), LEARNING_RATE, fused=True)
        self._error = 0.0
        self.stores = open_stores(client, options.env)
        self.num_updates = 0
        self.num_transitions = 0

    def batches(self) -> tdserve.Batches | tdserve.TakenBatches:
        """Returns samples for ``step``; the caller closes them."""
        return self.stores.transitions.batches(BATCH_SIZE, prefetch=4, timeout_s=ROWS_TIMEOUT_S)

    def step(self, batches: tdserve.Batches | tdserve.TakenBatches, **progress: Any) -> None:
        """Makes a few updates and publishes the policy with further ``progress``, or waits a moment for slower actors.

        Raises:
            TDServeError: The server did not answer, or no rows came. The updates made so far stay.
        """
        self.num_transitions = self.stores.transitions.info()["inserts"]
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

    def begin(self) -> tuple[Begun, str]:
        """Continues the run of the newest policy, or begins one, and tells the actors at once.

        Returns:
            The run, and a line that says which.
        """
        begun, line = Begun.now(self._client, self.stores), "begins"
        policy = self._client.latest(POLICY) if POLICY in self._client else None
        if policy is not None:
            for network in (self._network, self._target):
                TensorDict.from_module(network).data.update_(policy.data)
            self.num_updates = policy.metadata["num_updates"]
            self.num_transitions = policy.metadata["num_transitions"]
            line = f"begins a new run with the policy of version {policy.version}"
            if not policy.metadata.get("is_over"):
                begun = Begun(*(policy.metadata.get(name, 0) for name in Begun._fields))
                line = f"continues from version {policy.version}, {begun.seconds:.0f} s into the run"
        self.publish(is_over=False, **begun._asdict())
        return begun, line


def update(network: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, *, batch: TensorDictBase) -> float:
    """Improves the network on one batch, lets the target follow, and returns the loss."""
    optimizer.zero_grad()
    error = loss(network, target, batch)
    error.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    follow(target, network)
    return error.item()


def learn(
    learner: Learner,
    watch: RunWatch,
    options: DemoOptions,
    *,
    console: Console,
    check: Callable[[], Ending | None] = lambda: None,
) -> Ending:
    """Learns until the mean return is high enough or the time is up, and shows how it goes.

    Args:
        learner: A started learner.
        watch: Watches its run.
        options: Goal and longest duration.
        console: The console to print to.
        check: Called again and again; ends the run by what it returns.

    Raises:
        TDServeError: The server has not answered for as long as the client waits for it.
    """
    polled_s = -POLL_INTERVAL_S
    with open_display(console, options) as show, learner.batches() as batches:
        while (ending := check()) is None:
            if time.monotonic() - polled_s >= POLL_INTERVAL_S:
                watch.poll()
                polled_s = time.monotonic()
                show(watch.newest, watch.rates)
                ending = find_ending(watch.newest, options)
                if ending is not None:
                    break
            with suppress(TransportError, DeadlineExceededError, ServerBusyError):
                # no rows yet, or no server: the next poll waits for it
                learner.step(batches, is_over=False, **watch.progress)
    return ending


def learn_alone(options: DemoOptions) -> int:
    """Is ``tdserve demo --role learner``: learns with a server and actors that run elsewhere, and prints the result.

    When another learner has begun a run and not ended it, this one continues it from the last published policy.

    Returns:
        The exit code: 0.

    Raises:
        TDServeError: The server has been gone for two minutes, or refuses this learner.
        OSError: The figures cannot be written.
    """
    torch.set_num_threads(1)
    console = Console(highlight=False, markup=False, stderr=options.prints_json)
    console.print(f"learner: connects to {options.address}", soft_wrap=True)
    with options.connect(timeout_s=GONE_S) as client:
        learner = Learner(client, options)
        begun, line = learner.begin()
        console.print(f"learner: {line}", soft_wrap=True)
        watch = RunWatch(client, learner.stores, begun)
        ending = learn(learner, watch, options, console=console)
        learner.publish(is_over=True, **watch.progress)
        found = _checksum_of_quiet(learner.stores.transitions)
        watch.poll()
    result = Result(options, ending.reason, watch.newest, watch.episodes)
    if options.prints_json:
        print_json(describe_run(result))
    elif options.json_path is not None:
        write_json(result, options.json_path)
    print_summary(console, summarize(result))
    console.print(f"data checksum: {found}", soft_wrap=True)
    return ending.exit_code


def _checksum_of_quiet(replay: tdserve.ReplayHandle) -> str:
    """Returns the checksum once nothing is written any more."""
    end_s = time.monotonic() + QUIET_TIMEOUT_S
    num_rows = -1
    while num_rows != (now := replay.info()["inserts"]) and time.monotonic() < end_s:
        num_rows = now
        time.sleep(QUIET_S)
    return compute_checksum(replay)
