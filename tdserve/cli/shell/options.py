"""What the commands that ask a server share: their options, the client that they open, the form of their answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

import tdserve
from tdserve.base.config import ClientConfig, TransportName, read_token
from tdserve.base.tls import TLS
from tdserve.cli.screen.render import print_json, to_one_line
from tdserve.cli.shell.completion import complete_stores
from tdserve.cli.shell.exit_codes import NO_ANSWER
from tdserve.cli.shell.held_warnings import hold_warnings
from tdserve.client.cluster.cluster_catalog import ClusterCatalog
from tdserve.client.cluster.servers.membership import is_of_cluster, read_membership
from tdserve.client.session.catalog.catalog_client import CatalogClient

if TYPE_CHECKING:
    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient

CONNECT_TIMEOUT_S = 5.0
"""Seconds that a command waits for a server: a person typed the address, and is waiting."""

Command = Callable[..., Any]


def ask_server(command: Command) -> Command:
    """Adds ``--address``, ``--token-file`` and ``--json`` to a command, which gets an ``Inquiry`` first."""

    @wraps(command)
    def ask(*, address: str | None, token_file: Path | None, as_json: bool, **arguments: Any) -> Any:
        with hold_warnings():
            return command(Inquiry(address, token_file, as_json), **arguments)

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
        ask = option(ask)
    return ask


def take_store(command: Command) -> Command:
    """Adds the argument NAME, a store, which a shell can complete."""
    return click.argument("name", shell_complete=complete_stores)(command)


class Endpoint(NamedTuple):
    """The server of a command: its address, its token, and how content travels."""

    address: str
    token: str | None
    transport: TransportName = "auto"
    tls: TLS | None = None
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
    return Endpoint(address or settings.address, token, settings.transport, settings.find_tls(), settings.local_root)


class Inquiry(NamedTuple):
    """What a command asks, and how it answers.

    Attributes:
        address: The server or servers, as given.
        token_file: File of the token, as given.
        as_json: Whether the answer is one JSON document.
    """

    address: str | None
    token_file: Path | None
    as_json: bool

    def connect(self) -> Client | ClusterClient:
        """Opens a client, which imports torch."""
        return make_endpoint(self.address, self.token_file).connect(timeout_s=CONNECT_TIMEOUT_S)

    def connect_cluster(self) -> ClusterClient:
        """Opens a client of several servers. Raises UsageError if one is given."""
        endpoint = make_endpoint(self.address, self.token_file)
        if not is_of_cluster(endpoint.address):
            raise click.UsageError(f"{endpoint.address} is one server; give all of them, as in a:7707,b:7707")
        return cast("ClusterClient", endpoint.connect(timeout_s=CONNECT_TIMEOUT_S))

    def open_catalog(self) -> CatalogClient | ClusterCatalog:
        """Opens a client for commands that read no content; it does not import torch."""
        return open_catalog_client(self.address, self.token_file)

    def answer(self, document: Any, show: Callable[[], None]) -> None:
        """Prints the answer: the document as JSON, or what ``show`` prints."""
        print_json(document) if self.as_json else show()


def open_catalog_client(address: str | None, token_file: Path | None) -> CatalogClient | ClusterCatalog:
    """Opens a client for commands that read no content; it does not import torch."""
    server = make_endpoint(address, token_file)
    if is_of_cluster(server.address):
        return ClusterCatalog(
            read_membership(server.address), token=server.token, timeout_s=CONNECT_TIMEOUT_S, tls=server.tls
        )
    return CatalogClient(server.address, token=server.token, timeout_s=CONNECT_TIMEOUT_S, tls=server.tls)


def report_left_out(client: Client | ClusterClient, name: str) -> int:
    """Prints a line on stderr if shards of a store were left out of what was read of it; returns the exit code of the
    command, 0 if none were."""
    shards: list[int] = []
    if hasattr(client, "directory") and client.directory.find(name).placement is not None:
        opened = client[name]
        shards = [] if opened.placement.kind == "dataset" else opened.list_left_out()  # that is read whole, or not
    if shards:
        numbers = ", ".join(map(str, shards))
        line = f"shards {numbers} of {name!r} are left out: their servers do not answer, or have lost them"
        click.echo(f"tdserve: {to_one_line(line)}", err=True)
    return NO_ANSWER if shards else 0


def report_lost(client: CatalogClient | ClusterCatalog) -> int:
    """Prints a line on stderr for each server of a cluster that did not answer; returns the exit code of the command,
    0 if all did."""
    lost = client.describe_lost() if isinstance(client, ClusterCatalog) else ()
    for line in lost:
        click.echo(f"tdserve: {to_one_line(line)}", err=True)
    return NO_ANSWER if lost else 0
