"""``tdserve demo``: actors and a learner that do real work through one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tdserve.cli.options import Command
from tdserve.config import TRANSPORTS
from tdserve.errors import NotSupportedError
from tdserve.examples.demo.options import ROLES, DemoOptions

DEFAULTS = DemoOptions()


def _file(name: str, parameter: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, parameter, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=text)


@click.command(context_settings={"show_default": True})
@click.option("--transport", type=click.Choice(TRANSPORTS), default=DEFAULTS.transport)
@click.option("--seed", type=int, default=DEFAULTS.seed, help="Fixes actors' and learner's randomness.")
@click.option("--max-seconds", type=float, default=DEFAULTS.max_seconds, help="End then, solved or not.")
@click.option("--env", default=DEFAULTS.env, help="A gymnasium environment, discrete actions.")
@click.option("--actors", "num_actors", type=int, default=DEFAULTS.num_actors, help="Actor processes.")
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULTS.out, help="Folder for figures.")
@click.option("--root", type=click.Path(path_type=Path), help="The server's root, kept; a temporary one unless told.")
@_file("--json", "json_path", "The figures; figures.json in the folder unless told.")
@_file("--png", "png_path", "The learning curve; learning-curve.png in the folder unless told.")
@click.option("--role", type=click.Choice(ROLES), help="Be only this part, of a server that runs elsewhere.")
@click.option("--address", metavar="HOST:PORT", help="That server.")
@click.option("--index", type=int, default=DEFAULTS.index, help="Number of this actor, from 0.")
def demo(**settings: Any) -> int:
    """Train CartPole: a server, two actors and a learner as separate processes that talk over TCP.

    Ends when the mean return of the last 20 episodes is high enough, or after --max-seconds.
    """
    options = DemoOptions(**settings)
    try:
        from tdserve.examples.demo.main import run  # imports torch and gymnasium
    except ModuleNotFoundError as missing:
        if missing.name not in ("gymnasium", "matplotlib"):
            raise
        reason = f"{missing.name} is not installed: pip install 'tdserve[demo]'"
        raise NotSupportedError(feature="the demo", reason=reason) from missing
    return run(options)
