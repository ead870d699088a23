"""What one question to each server brings: figures of its processes, stores and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from tdserve.base.errors import TDServeError
from tdserve.cli.shell.options import Inquiry, make_endpoint
from tdserve.client.cluster.servers.membership import is_of_cluster, read_membership
from tdserve.client.session.catalog.catalog_client import CatalogClient

ASK_TIMEOUT_S = 3.0
"""Longest wait for a server's answer: the others are shown meanwhile."""


class ServerFigures(NamedTuple):
    """What a server has answered.

    Attributes:
        server: Its number; 0 if it is the only one.
        address: Where it is.
        figures: An ObserveResponse; None if it does not answer.
        fault: Why not.
    """

    server: int
    address: str
    figures: Any
    fault: TDServeError | None = None


class FigureReader:
    """Asks one server or all of a cluster.

    Args:
        clients: By number.
    """

    def __init__(self, clients: dict[int, CatalogClient]) -> None:
        self._clients = clients
        self._pool = ThreadPoolExecutor(max(len(clients), 1))

    @property
    def is_of_cluster(self) -> bool:
        """Whether there are several servers."""
        return len(self._clients) > 1

    def ask(self, *, max_stores: int, max_sessions: int) -> list[ServerFigures]:
        """Asks all at the same time.

        Raises:
            TDServeError: None answers.
        """

        def ask_one(server: int) -> ServerFigures:
            client = self._clients[server]
            try:
                figures = client.observe(
                    max_stores=max_stores, names=[], max_sessions=max_sessions, timeout_s=ASK_TIMEOUT_S
                )
            except TDServeError as error:
                return ServerFigures(server, client.address, None, error)
            return ServerFigures(server, client.address, figures)

        found = list(self._pool.map(ask_one, self._clients))
        faults = [each.fault for each in found if each.fault is not None]
        if len(faults) == len(found):
            raise faults[0]
        return found


@contextmanager
def open_figures(inquiry: Inquiry) -> Iterator[FigureReader]:
    """Opens a client of each server that a command asks; imports no torch."""
    endpoint = make_endpoint(inquiry.address, inquiry.token_file)
    addresses, token = [endpoint.address], endpoint.token
    if is_of_cluster(endpoint.address):
        servers = read_membership(endpoint.address)
        token = token or servers.token
        addresses = [servers.find(server) for server in range(servers.num_servers)]
    with ExitStack() as stack:
        clients = {
            server: stack.enter_context(CatalogClient(address, token=token, timeout_s=ASK_TIMEOUT_S, tls=endpoint.tls))
            for server, address in enumerate(addresses)
        }
        yield FigureReader(clients)


def list_lost(found: list[ServerFigures]) -> list[ServerFigures]:
    """Returns the servers that do not answer."""
    return [each for each in found if each.figures is None]
