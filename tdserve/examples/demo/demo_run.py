"""The whole demo: starts a server and actors, is the learner, and leaves nothing behind."""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console

import tdserve
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.base.machine import get_own_command
from tdserve.cli.screen.progress import show_step
from tdserve.cli.screen.render import print_json
from tdserve.examples.demo.demo_options import DemoOptions
from tdserve.examples.demo.demo_stores import get_sizes
from tdserve.examples.demo.learner import Learner, learn
from tdserve.examples.demo.processes import Processes, hold_signals
from tdserve.examples.demo.run_report import (
    Ending,
    Result,
    describe_run,
    find_target,
    print_summary,
    summarize,
    write_json,
)
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, RunWatch

SERVER_TIMEOUT_S = 10.0
"""The server runs on this machine, and is not started again: once it serves, it answers sooner or never."""

STARTING = "starts {} actors, which import torch; the first figures come after some seconds"


def run(options: DemoOptions) -> int:
    """Runs the whole demo.

    Returns:
        The exit code: 0 when the run was solved or the time was up, 1 when a process died, 128 + signal when a signal
        stopped it. In every case no process, socket or temporary file is left.

    Raises:
        NotSupportedError: The environment is not one that the demo can learn.
        InvalidRequestError: The figures cannot be written where the options say. Nothing was started.
    """
    get_sizes(options.env)
    _make_folders(options)
    torch.set_num_threads(1)
    console = Console(highlight=False, stderr=options.prints_json)
    with hold_signals() as signals:
        with tempfile.TemporaryDirectory(prefix="tdserve-demo-") as folder:
            result, ending = _run_all(options, Path(folder), signals, console)
        write_json(result, options.figures_path)
        draw(result, options.curve_path)
        print_summary(console, summarize(result))
        if ending.details:
            Console(stderr=True).print(ending.details, markup=False, highlight=False, soft_wrap=True)
        console.print(f"{options.curve_path}\n{options.figures_path}", soft_wrap=True)
        if options.prints_json:
            print_json(describe_run(result))
        return ending.exit_code


def _run_all(
    options: DemoOptions, folder: Path, signals: list[signal.Signals], console: Console
) -> tuple[Result, Ending]:
    """Is the learner, and starts the others. All have ended when it returns."""
    with ExitStack() as stack:
        with show_step(console, "starts a server and connects to it"):
            server = stack.enter_context(tdserve.Server(options.root or folder / "root"))
            actors = stack.enter_context(closing(Processes(folder)))
            # connect first: a data worker takes long to start beside more processes that import torch
            client = stack.enter_context(tdserve.connect(server.address, transport=options.transport))
        client.timeout_s = SERVER_TIMEOUT_S
        address = server.address
        console.print(f"server {address}; look inside: {get_own_command()} ls --address {address}", soft_wrap=True)
        learner = Learner(client, options)
        watch = RunWatch(client, learner.stores, learner.begin()[0])
        for index in range(options.num_actors):
            arguments = options.arguments(address=address, index=index)
            actors.start(f"actor {index}", "tdserve.examples.demo.actor", arguments)
        console.print(STARTING.format(options.num_actors), soft_wrap=True)

        def check() -> Ending | None:
            # A signal to the whole group may end the server, and its end may end the others: name the cause first.
            if signals:
                return Ending(f"stopped by {signals[0].name}", 128 + signals[0])
            if not server.is_alive:
                return Ending("lost the server: its process ended", 1)
            death = actors.find_death()
            return None if death is None else Ending(str(death), 1, death.last_lines)

        try:
            ending = learn(learner, watch, options, console=console, check=check)
            if server.is_alive:
                learner.publish(is_over=True, **watch.progress)
        except TDServeError as fault:
            ending = check() or Ending(f"lost the server: {fault}", 1)
    return Result(options, ending.reason, watch.newest, watch.episodes), ending


def _make_folders(options: DemoOptions) -> None:
    for path in (options.figures_path, options.curve_path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise InvalidRequestError(argument="out", reason=f"cannot make {path.parent}: {fault.strerror}") from fault


def draw(result: Result, path: Path) -> None:
    """Draws the learning curve: a dot for every episode, and a line for the mean of the last 20."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # needs no display, and no state of pyplot
    axes = figure.add_subplot()
    for actor in sorted({episode.actor for episode in result.episodes}):
        mine = [episode for episode in result.episodes if episode.actor == actor]
        returns = [episode.episode_return for episode in mine]
        axes.plot([episode.seconds for episode in mine], returns, ".", alpha=0.4, label=f"episodes of actor {actor}")
    if result.curve:
        seconds, means = zip(*result.curve, strict=True)
        axes.plot(seconds, means, "k-", label=f"mean of the last {NUM_EPISODES_OF_MEAN}")
    target = find_target(result.options)
    if target is not None:
        axes.axhline(target, color="tab:green", linestyle="--", label=f"solved: {target:g}")
    axes.set(xlabel="seconds", ylabel="return", title=f"{result.options.title}: {result.ending}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
