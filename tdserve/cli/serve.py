"""``tdserve serve ROOT``: a server in the foreground."""

from __future__ import annotations

import os
from typing import Any

import click

from tdserve.base.adoptions import parse_folders
from tdserve.base.config import ServerConfig, parse_bytes, parse_devices, parse_umask
from tdserve.cli.lasting import lasting


@click.command()
@click.argument("root", required=False)
@click.option("--host", help="Address to listen on; by default 127.0.0.1.")
@click.option("--port", type=int, help="TCP port; by default 7707; 0 picks a free one.")
@click.option("--workers", "num_workers", type=int, metavar="N", help="Data worker processes; by default 1.")
@click.option(
    "--device",
    "devices",
    multiple=True,
    callback=lambda _, __, names: parse_devices(",".join(names)) or None,
    metavar="cuda:N",
    help="GPU of a data worker, for content by NCCL; given once per worker, or separated by commas.",
)
@click.option("--token-file", help="File with the token that every call must carry.")
@click.option("--insecure", is_flag=True, default=None, help="Listen on other addresses than loopback without a token.")
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="Name by which clients reach this server; does not open a port."
)
@click.option(
    "--interface",
    metavar="ADDRESS",
    help="Interface for content, by address or name; by default the one that clients reach.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    metavar="SECONDS",
    help="Time for calls under way to end at shutdown; by default 10.",
)
@click.option(
    "--transfer-timeout",
    "transfer_timeout_s",
    type=float,
    metavar="SECONDS",
    help="Ends a transfer without progress; by default 30.",
)
@click.option(
    "--worker-timeout",
    "worker_timeout_s",
    type=float,
    metavar="SECONDS",
    help="Replaces a data worker that hangs; by default 10.",
)
@click.option(
    "--sync-interval",
    "sync_interval_s",
    type=float,
    metavar="SECONDS",
    help="Time between syncs to the disk; by default 30; 0 syncs only at the end.",
)
@click.option(
    "--inline-bytes", type=int, metavar="N", help="Largest payload that travels inside a message; by default 32768."
)
@click.option(
    "--memory-limit",
    "memory_limit_bytes",
    callback=lambda _, __, text: None if text is None else _parse_bytes(text),
    metavar="SIZE",
    help="Limit for waiting requests and their content, such as 512M; by default 1G.",
)
@click.option("--log-level", metavar="LEVEL", help="Lowest level to log: debug, info, warning, error; by default info.")
@click.option(
    "--umask",
    callback=lambda _, __, text: None if text is None else _parse_mask(text),
    metavar="OCTAL",
    help="Umask of new files; 002 lets local clients of the server's group write in place; by default 022.",
)
@click.option(
    "--adopt",
    multiple=True,
    callback=lambda _, __, paths: tuple(map(os.path.abspath, paths)) or None,
    metavar="PATH=NAME[:ro]",
    help="Serve the memory-mapped tensordict in PATH as store NAME, as tdserve adopt does; given once for each.",
)
@click.option(
    "--adoptable",
    multiple=True,
    callback=lambda _, __, folders: parse_folders(os.pathsep.join(folders)) or None,
    metavar="DIR",
    help="Any client may have folders below it adopted; given once for each, or separated by colons.",
)
@lasting
def serve(**settings: Any) -> int:
    """Serve the stores under the folder ROOT until SIGTERM or Ctrl-C.

    Prints one line when it is ready: "tdserve ready at HOST:PORT". Options that are not given are read from
    TDSERVE_ROOT, TDSERVE_HOST, TDSERVE_PORT and so on.
    """
    config = ServerConfig.from_env(**settings).validate()

    from tdserve.server.server_process import run  # only this command needs gRPC's server side

    return run(config)


def _parse_mask(text: str) -> int:
    try:
        return parse_umask(text)
    except ValueError as fault:
        raise click.BadParameter(f"{text!r} is not an octal mask") from fault


def _parse_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as fault:
        raise click.BadParameter(f"{text!r} is not a number of bytes") from fault
