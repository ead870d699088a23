"""Options that several commands share, and the client that they open with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

import tdserve
from tdserve.base.config import ClientConfig, TransportName, read_token
from tdserve.client.cluster.membership import is_of_cluster
from tdserve.client.session.catalog_client import CatalogClient

if TYPE_CHECKING:
    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient

CONNECT_TIMEOUT_S = 5.0
"""Seconds that a command waits for a server: a person typed the address, and is waiting."""

Command = Callable[..., Any]


def add_client_options(command: Command) -> Command:
    """Adds ``--address``, ``--token-file`` and ``--json`` to a command that asks a server."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            help="File with the server's token; by default $TDSERVE_TOKEN or $TDSERVE_TOKEN_FILE.",
        ),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help="The server, or HOST:PORT,HOST:PORT; else $TDSERVE_ADDRESS, or the one here.",
        ),
    ):
        command = option(command)
    return command


class Endpoint(NamedTuple):
    """The server of a command: its address, its token, and how content travels."""

    address: str
    token: str | None
    transport: TransportName = "auto"
    root: str | None = None  # where this process sees the server's root, if elsewhere than the server does

    def connect(self, *, timeout_s: float) -> Client:
        """Opens a client of that server."""
        options = self._asdict()
        return tdserve.connect(options.pop("address"), timeout_s=timeout_s, **options)


def make_endpoint(address: str | None, token_file: Path | None) -> Endpoint:
    """Returns the server that the options name, or else the environment.

    Raises:
        InvalidRequestError: The token file cannot be read, or a variable has an invalid value.
    """
    settings = ClientConfig.from_env()
    token = settings.find_token() if token_file is None else read_token(token_file, "--token-file")
    return Endpoint(address or settings.address, token, settings.transport, settings.local_root)


def open_catalog_client(address: str | None, token_file: Path | None) -> CatalogClient | ClusterClient:
    """Opens a client for commands that read no content; of one server it does not import torch."""
    server = make_endpoint(address, token_file)
    if is_of_cluster(server.address):
        return cast("ClusterClient", server.connect(timeout_s=CONNECT_TIMEOUT_S))
    return CatalogClient(server.address, token=server.token, timeout_s=CONNECT_TIMEOUT_S)
