"""The files that remain of a run: its figures as JSON, its learning curve as PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tdserve.examples.demo.result import Result, write_json
from tdserve.examples.demo.watch import NUM_EPISODES_OF_MEAN


def write(result: Result) -> None:
    """Writes both files where the options say.

    Raises:
        OSError: A folder or file cannot be written.
    """
    write_json(result, result.options.figures_path)
    draw(result, result.options.curve_path)


def draw(result: Result, path: Path) -> None:
    """Draws the learning curve: every episode a dot, the mean of the last 20 a line."""
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
    title = f"{result.options.env}, seed {result.options.seed}: {result.ending}"
    axes.set(xlabel="seconds", ylabel="return", title=title)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
