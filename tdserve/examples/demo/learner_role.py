"""``tdserve demo --role learner``: the learner as a process of its own, which also watches the run and sums it up."""

from __future__ import annotations

import time

import torch
from rich.console import Console

import tdserve
from tdserve.base.errors import DeadlineExceededError
from tdserve.examples.demo.checksum import Checksum, checksum
from tdserve.examples.demo.goal import SOLVED, Ending, Goal, target_of
from tdserve.examples.demo.learner import Learner
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.patience import BORNE, Patience
from tdserve.examples.demo.progress import Progress, print_summary
from tdserve.examples.demo.result import Result, summary, write_json
from tdserve.examples.demo.stores import PATIENCE_S, POLICY, Stores, open_stores
from tdserve.examples.demo.watch import Begun, Watch

GONE_S = 120.0
"""A server that has not answered for so long will not come back by itself."""

ROWS_TIMEOUT_S = 2.0
"""Nobody may be there who writes rows: progress is shown, and the time is up, all the same."""

POLL_INTERVAL_S = 1.0

QUIET_S = 1.0
"""When nothing was written for so long, the actors have heard that it is over."""

QUIET_TIMEOUT_S = 15.0
"""An actor that waits for a server or a network may write until then; its last rows are not waited for longer."""


def learn_alone(options: DemoOptions) -> int:
    """Learns until the mean return is high enough or ``max_seconds`` are over, and prints what came of it.

    A run that another learner has begun and not ended is taken up where its last published policy says.

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
    target = target_of(options)
    with options.connect(timeout_s=PATIENCE_S) as client:
        stores = patience.call(lambda: open_stores(client, options.env))
        learner = patience.call(lambda: Learner(client, options))
        begun, line = patience.call(lambda: _begin(client, learner, stores))
        say(line)
        watch = Watch(client, stores, begun)
        with Progress(console, title=f"{options.env}, seed {options.seed}", target=target) as progress:
            ending = _learn(learner, watch, progress, patience, goal=Goal(target, options.max_seconds), begun=begun)
        patience.call(lambda: learner.publish(is_over=True, **_said(watch, begun)))
        found = patience.call(lambda: _checksum_of_quiet(stores.transitions))
        patience.call(watch.poll)
    result = Result(options, target, ending.reason, ending == SOLVED, watch.newest, watch.episodes)
    if options.json_path is not None:
        write_json(result, options.json_path)
    print_summary(console, "tdserve demo", summary(result))
    console.print(f"data checksum: {found}", soft_wrap=True, highlight=False)
    return ending.exit_code


def _begin(client: tdserve.Client, learner: Learner, stores: Stores) -> tuple[Begun, str]:
    """Takes up the run of the newest policy, or begins one; says so to the actors at once."""
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
    learner: Learner, watch: Watch, progress: Progress, patience: Patience, *, goal: Goal, begun: Begun
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
                continue  # no rows yet; whether the server still answers, the next poll shows
            except BORNE as error:
                patience.bear(error)


def _said(watch: Watch, begun: Begun) -> dict[str, float]:
    """What each published policy says, for a process that takes the run up."""
    return begun._replace(seconds=watch.seconds)._asdict()


def _checksum_of_quiet(replay: tdserve.ReplayHandle) -> Checksum:
    """The checksum once nothing is written any more."""
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    num_rows = -1
    while num_rows != (now := replay.info()["inserts"]) and time.monotonic() < deadline_s:
        num_rows = now
        time.sleep(QUIET_S)
    return checksum(replay)
