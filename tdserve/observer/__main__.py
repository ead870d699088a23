"""``python -m tdserve.observer``, started by the control process, which sends its settings on standard input.

The process ends when that input ends, and with the thread that started it. Whatever it is asked for costs the control
process one question a second at most.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import ssl
import sys
from functools import partial
from typing import Any

import uvicorn

import tdserve
from tdserve.base.client_setup import begin_client_process
from tdserve.base.errors import TDServeError
from tdserve.base.tls import ServerFiles, make_server_context
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tdserve.observer.app import make_app
from tdserve.observer.pages.row_preview import RowPreviews
from tdserve.observer.snapshots import ASK_TIMEOUT_S, Snapshots
from tdserve.observer.viewers import Viewer, Viewers
from tdserve.v1 import control_pb2

NICENESS = 5
"""Niceness of the process: whatever serves requests goes first."""

MAX_CONNECTIONS = 64
"""Most connections at a time; those beyond it are answered 503."""

PREVIEW_TIMEOUT_S = 10.0
"""Longest wait for rows, by the first of which this process imports torch."""

QUIET_LOGGERS = ("uvicorn.error", "tdserve.client")
"""Loggers that repeat what the control process logs, or what any process with a socket can cause."""


_log = logging.getLogger("tdserve.observer")


class PageTLS:
    """The TLS of the next connections, by the server's certificate, which is read again when it changes.

    Args:
        cert, key: PEM files of the certificate.
        client_ca: PEM file of the authorities for clients; None asks clients for no certificate.

    Raises:
        InvalidRequestError: They cannot be used.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._files = ServerFiles(cert, key, client_ca, load=partial(make_server_context, "tls_cert"), log=_log)

    def make_context(self) -> ssl.SSLContext:
        """Returns a context for a port; each handshake looks whether the files have changed."""
        context = self._files.loaded

        def choose(connection: ssl.SSLObject, name: str | None, port: ssl.SSLContext) -> None:
            self._files.renew()
            connection.context = self._files.loaded

        context.sni_callback = choose  # called for clients that name no server, too
        return context


async def serve(settings: dict[str, Any]) -> None:
    """Serves until standard input ends."""
    address, token = settings["address"], settings["token"]

    def open_viewer(token: str | None) -> Viewer:
        client = CatalogClient(address, token=token)
        previews = RowPreviews(lambda: tdserve.connect(address, token=token, timeout_s=PREVIEW_TIMEOUT_S))
        return Viewer(Snapshots(client), previews, client.close)

    def check_token(token: str) -> None:
        with CatalogClient(address, token=token, timeout_s=ASK_TIMEOUT_S) as client:
            client.call("ListStores", control_pb2.ListStoresRequest(page_size=1))

    own = open_viewer(token)
    try:
        viewers = Viewers(
            own, asks_token=token is not None, open_viewer=open_viewer, check_token=check_token, known=token
        )
        app = make_app(viewers, hosts=settings["hosts"])
        config = uvicorn.Config(
            app,
            access_log=False,
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
            ws="none",
        )
        if settings["tls"] is not None:
            config.load()
            config.ssl = PageTLS(*settings["tls"]).make_context()
        server = uvicorn.Server(config)
        _call_at_end(sys.stdin.fileno(), lambda: setattr(server, "should_exit", True))
        await server.serve(sockets=[socket.socket(fileno=settings["fd"])])
    finally:
        own.close()


def _call_at_end(fd: int, on_end: Any) -> None:
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)

    def look() -> None:
        if not os.read(fd, 1 << 12):
            loop.remove_reader(fd)
            on_end()

    loop.add_reader(fd, look)


def main() -> int:
    """Runs the process."""
    settings = begin_client_process("tdserve observer", niceness=NICENESS)
    if settings is None:
        return 0
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.freeze()
    try:
        asyncio.run(serve(settings))
    except TDServeError as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
