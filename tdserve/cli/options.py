"""Options that several commands share, and the client that they open with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from tdserve.client.catalog_client import CatalogClient
from tdserve.config import ClientConfig
from tdserve.errors import InvalidRequestError

CONNECT_TIMEOUT_S = 5.0
"""Seconds that a command waits for a server: a person sits in front of it, and typed the address."""

Command = Callable[..., Any]


def client_options(command: Command) -> Command:
    """Adds ``--address``, ``--token-file`` and ``--json`` to a command that asks a server."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            help="File that holds the server's token; $TDSERVE_TOKEN otherwise.",
        ),
        click.option(
            "--address", metavar="HOST:PORT", help="The server; $TDSERVE_ADDRESS otherwise, or 127.0.0.1:7707."
        ),
    ):
        command = option(command)
    return command


class Endpoint(NamedTuple):
    """Where a command's server is, and what opens it."""

    address: str
    token: str | None


def endpoint(address: str | None, token_file: Path | None) -> Endpoint:
    """The server that the options name, or else the environment.

    Raises:
        InvalidRequestError: The token file cannot be read, or a variable holds no such value.
    """
    settings = ClientConfig.from_env()
    token = settings.token if token_file is None else read_token(token_file)
    return Endpoint(address or settings.address, token)


def catalog_client(address: str | None, token_file: Path | None) -> CatalogClient:
    """A client for commands that read no content: it does not wait for torch to be imported."""
    server = endpoint(address, token_file)
    return CatalogClient(server.address, token=server.token, timeout_s=CONNECT_TIMEOUT_S)


def read_token(path: Path) -> str:
    """The token in a file, white space at its ends removed, because editors end files with a line feed.

    Raises:
        InvalidRequestError: The file cannot be read, or holds no text.
    """
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidRequestError(argument="--token-file", reason=f"cannot read {path}: {fault}") from fault
    if not token:
        raise InvalidRequestError(argument="--token-file", reason=f"{path} is empty")
    return token
