"""``tdserve serve ROOT``: a server in the foreground."""

from __future__ import annotations

from typing import Any

import click

from tdserve.base.config import ServerConfig
from tdserve.cli.serving.server_flags import add_server_options, read_defaults
from tdserve.cli.shell.lasting import lasting


@click.command()
@add_server_options
@lasting
def serve(config_path: str | None, **settings: Any) -> int:
    """Serve the stores under the folder ROOT until SIGTERM or Ctrl-C.

    Prints one line when it is ready: "tdserve ready at HOST:PORT". Options that are not given are read from
    TDSERVE_ROOT, TDSERVE_HOST, TDSERVE_PORT and so on, then from the file of --config; `tdserve config show` shows
    what came from where.
    """
    config = ServerConfig.from_env(defaults=read_defaults(config_path), **settings).validate()

    from tdserve.server.server_process import run  # only this command needs gRPC's server side

    return run(config)
