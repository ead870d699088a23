"""The parent process of the demo: starts server, actors and learner, watches them, and leaves nothing behind."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

import tdserve
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.base.machine import get_own_command
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.processes import Processes, Signals
from tdserve.examples.demo.report import Ending, Goal, ProgressDisplay, Result, print_summary, summary, write_json
from tdserve.examples.demo.stores import open_stores, sizes
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN, Begun, Watch

POLL_INTERVAL_S = 0.5

STARTING = "starts {} actors and a learner, which import torch; the first figures come after some seconds"


def run(options: DemoOptions) -> int:
    """Runs the whole demo.

    Returns:
        The exit code: 0 when the run was solved or the time was up, 1 when a process died, 128 + signal when a signal
        stopped it. In every case no process, socket or temporary file is left.

    Raises:
        NotSupportedError: The environment is not one that the demo can learn.
        InvalidRequestError: The figures cannot be written where the options say. Nothing was started.
    """
    sizes(options.env)
    _make_folders(options)
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="tdserve-demo-") as folder:
        return _run_all(options, Path(folder), signals)


def _run_all(options: DemoOptions, folder: Path, signals: Signals) -> int:
    started_s = time.time()
    console = Console()
    goal = Goal.of(options)
    processes = Processes(folder)
    with tdserve.Server(options.root or folder / "root") as server:
        console.print(
            f"server {server.address}; look inside: {get_own_command()} ls --address {server.address}", highlight=False
        )
        try:
            # connect first: a data worker takes long to start beside three more processes that import torch
            with tdserve.connect(server.address, transport=options.transport) as client:
                stores = open_stores(client, options.env)
                watch = Watch(client, stores, Begun.now(client, stores)._replace(seconds=time.time() - started_s))
                module = "tdserve.examples.demo"
                for index in range(options.num_actors):
                    arguments = options.arguments(address=server.address, index=index)
                    processes.start(f"actor {index}", f"{module}.actor", arguments)
                processes.start("learner", f"{module}.learner", options.arguments(address=server.address))
                console.print(STARTING.format(options.num_actors), highlight=False, soft_wrap=True)
                with ProgressDisplay(console, title=options.title, target=goal.target) as progress:
                    ending = _follow(watch, progress, server, processes=processes, signals=signals, goal=goal)
        finally:
            processes.stop()
    result = Result(options, goal.target, ending.reason, watch.newest, watch.episodes)
    write_json(result, options.figures_path)
    draw(result, options.curve_path)
    print_summary(console, summary(result))
    if ending.details:
        Console(stderr=True).print(ending.details, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{options.curve_path}\n{options.figures_path}", soft_wrap=True, highlight=False)
    return ending.exit_code


def _follow(
    watch: Watch,
    progress: ProgressDisplay,
    server: tdserve.Server,
    *,
    processes: Processes,
    signals: Signals,
    goal: Goal,
) -> Ending:
    while True:
        death = processes.death()
        fault = _poll(watch) if server.is_alive else "its process ended"
        # A signal to the whole group may end the server, and its end may end the others: name the cause first.
        if signals.received is not None:
            return Ending(f"stopped by {signals.received.name}", 128 + signals.received)
        if fault is not None:
            return Ending(f"lost the server: {fault}", 1)
        if death is not None:
            return Ending(str(death), 1, death.last_lines)
        progress.show(watch.newest, watch.rates)
        ending = goal.ending(watch.newest)
        if ending is not None:
            return ending
        time.sleep(POLL_INTERVAL_S)


def _poll(watch: Watch) -> str | None:
    try:
        watch.poll()
    except TDServeError as fault:
        return str(fault)
    return None


def _make_folders(options: DemoOptions) -> None:
    for path in (options.figures_path, options.curve_path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise InvalidRequestError(argument="out", reason=f"cannot make {path.parent}: {fault.strerror}") from fault


def draw(result: Result, path: Path) -> None:
    """Draws the learning curve: a dot for every episode, and a line for the mean of the last 20."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display, and no state of pyplot
    axes = figure.add_subplot()
    for actor in sorted({episode.actor for episode in result.episodes}):
        mine = [episode for episode in result.episodes if episode.actor == actor]
        returns = [episode.episode_return for episode in mine]
        axes.plot([episode.seconds for episode in mine], returns, ".", alpha=0.4, label=f"episodes of actor {actor}")
    if result.curve:
        seconds, means = zip(*result.curve, strict=True)
        axes.plot(seconds, means, "k-", label=f"mean of the last {NUM_EPISODES_OF_MEAN}")
    if result.target is not None:
        axes.axhline(result.target, color="tab:green", linestyle="--", label=f"solved: {result.target:g}")
    axes.set(xlabel="seconds", ylabel="return", title=f"{result.options.title}: {result.ending}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
