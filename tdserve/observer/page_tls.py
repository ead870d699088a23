"""TLS of the page and the metrics, by the server's certificate, which is read again when it changes."""

from __future__ import annotations

import logging
import ssl
from functools import partial

from tdserve.base.tls import ServerFiles, make_server_context

_log = logging.getLogger("tdserve.observer")


class PageTLS:
    """The context of the next connections.

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
