"""TLS of the page and the metrics, by the server's certificate, which is read again when it changes."""

from __future__ import annotations

import logging
import ssl

from tdserve.base.errors import InvalidRequestError
from tdserve.base.tls import find_version, make_server_context

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
        self._files = (cert, key, client_ca)
        self._version = find_version(*self._files)
        self._context = make_server_context("tls_cert", *self._files)

    def make_context(self) -> ssl.SSLContext:
        """Returns a context for a port; each handshake looks whether the files have changed."""
        context = make_server_context("tls_cert", *self._files)

        def choose(connection: ssl.SSLObject, name: str | None, port: ssl.SSLContext) -> None:
            connection.context = self._find_context()

        context.sni_callback = choose  # called for clients that name no server, too
        return context

    def _find_context(self) -> ssl.SSLContext:
        version = find_version(*self._files)
        if version != self._version:
            self._version = version
            try:
                self._context = make_server_context("tls_cert", *self._files)
            except InvalidRequestError as error:
                _log.warning("the certificates have changed and cannot be used, the former ones stay: %s", error)
        return self._context
