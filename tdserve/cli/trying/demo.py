"""``tdserve demo``: actors and a learner that do real work through one server."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tdserve.base.addresses import parse_address
from tdserve.base.config import TRANSPORTS, ServerConfig
from tdserve.base.errors import NotSupportedError
from tdserve.cli.screen.progress import show_step
from tdserve.cli.shell.lasting import lasting
from tdserve.cli.shell.number_types import TimeRange
from tdserve.cli.shell.options import Command, make_endpoint
from tdserve.examples.demo.demo_options import ROLES, STDOUT, DemoOptions

DEFAULTS = DemoOptions()


def _add_file_option(name: str, parameter: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, parameter, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=text)


@click.command(context_settings={"show_default": True})
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    help="How content travels; by default gloo, and for a --role $TDSERVE_TRANSPORT or else auto.",
)
@click.option("--seed", type=int, default=DEFAULTS.seed, help="Fixes actors' and learner's randomness.")
@click.option(
    "--max-seconds", type=TimeRange(), default=DEFAULTS.max_seconds, help="End after this time, solved or not."
)
@click.option("--env", default=DEFAULTS.env, help="A gymnasium environment, discrete actions.")
@click.option("--target", type=float, help="Mean return that counts as solved; by default the environment's own.")
@click.option("--actors", "num_actors", type=int, default=DEFAULTS.num_actors, help="Actor processes.")
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULTS.out, help="Folder for figures.")
@click.option("--root", type=click.Path(path_type=Path), help="The server's root, kept; by default a temporary one.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    is_flag=False,
    flag_value=str(STDOUT),
    metavar="[FILE]",
    help="Print the figures as one JSON document, or write them to FILE; always in figures.json in the folder.",
)
@_add_file_option("--png", "png_path", "File for the learning curve; by default learning-curve.png in the folder.")
@click.option("--role", type=click.Choice(ROLES), help="Run only this part, as a container does.")
@click.option("--address", metavar="HOST:PORT", help="The role's server; else $TDSERVE_ADDRESS, or a local one.")
@click.option("--index", type=int, help="Number of this actor, from 0; by default the host name's.")
@click.option(
    "--linger",
    "linger_s",
    type=TimeRange(min=0.0),
    default=DEFAULTS.linger_s,
    metavar="SECONDS",
    help="Time an actor waits after the end for another run. Use it where the first container to exit stops the rest.",
)
@lasting
def demo(**settings: Any) -> int:
    """Train CartPole: a server, two actors and a learner as separate processes that talk over TCP.

    Ends when the mean return of the last 20 episodes is high enough, or after --max-seconds. With --role it runs only
    one of these processes. Each waits for the others, survives their restarts, and ends after the learner has finished.
    """
    role = settings["role"]
    if role is None:
        options = DemoOptions(**_drop_unset(settings))
        with show_step(Console(stderr=options.prints_json), "imports torch and gymnasium"), _explain_missing():
            from tdserve.examples.demo.demo_run import run  # imports torch and gymnasium
        return run(options)
    if role == "server":
        from tdserve.server.server_process import run as serve  # needs gRPC's server side

        return serve(make_server_config(settings["address"], settings["root"]).validate())
    options = _make_role_options(settings)
    with _explain_missing():
        if role == "actor":
            from tdserve.examples.demo.actor import act

            return act(options)
        from tdserve.examples.demo.learner import learn_alone

        return learn_alone(options)


def make_server_config(
    address: str | None, root: Path | None, environ: Mapping[str, str] | None = None
) -> ServerConfig:
    """Returns the server's settings, from ``TDSERVE_*`` variables and from the address that the other roles use.

    Args:
        address: ``host:port`` of the server for the other roles. A name or address that other machines can reach means
            every interface, because a container's health check comes over loopback. None means ``127.0.0.1:7707``.
        root: The folder that the server owns; None reads ``TDSERVE_ROOT``.
        environ: The variables; None reads those of the process.

    Raises:
        InvalidRequestError: A setting is not possible, or there is no root.
    """
    defaults = {}
    if address is not None:
        host, port = parse_address("address", address)
        is_here = ServerConfig(root="", host=host).is_loopback
        defaults = {"host": host if is_here else "0.0.0.0", "port": port}  # noqa: S104 (not without a token)
    return ServerConfig.from_env(environ, defaults=defaults, root=None if root is None else str(root))


def derive_index(hostname: str) -> int:
    """Returns the number of an actor that was given none.

    It is the one at the end of ``actor-3``, one made of a container's id, or 0. The actors of one service in containers
    differ only in this name, and have to explore differently.
    """
    numbered = re.fullmatch(r".*[-_.](\d{1,6})", hostname)
    if numbered:
        return int(numbered[1])
    return int(hostname, 16) % 10_000 if re.fullmatch(r"[0-9a-f]{12}", hostname) else 0


def _drop_unset(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _make_role_options(settings: dict[str, Any]) -> DemoOptions:
    server = make_endpoint(settings["address"], None)
    found = {"transport": server.transport, "index": derive_index(socket.gethostname()), **_drop_unset(settings)}
    return DemoOptions(**{**found, "address": server.address, "token": server.token, "local_root": server.root})


@contextmanager
def _explain_missing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in ("gymnasium", "matplotlib"):
            raise
        reason = f"{missing.name} is not installed: pip install 'tdserve[demo]'"
        raise NotSupportedError(feature="the demo", reason=reason) from missing
