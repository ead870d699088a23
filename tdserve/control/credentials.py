"""TLS of gRPC, made of our settings: of a server, which reads its files again when they change, and of a client."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from tdserve.base.errors import InvalidRequestError
from tdserve.base.tls import TLS, ServerFiles, make_server_context, read_pem

_log = logging.getLogger("tdserve.control")


class ServerCertificates:
    """The certificates of a server. Threads: safe.

    Args:
        cert, key: PEM files of its own certificate.
        client_ca: PEM file of the authorities for clients; None asks clients for no certificate.

    Raises:
        InvalidRequestError: They cannot be used.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._cert, self._asks_clients = cert, client_ca is not None
        self._paths = [path for path in (cert, key, client_ca) if path is not None]
        self._files = ServerFiles(cert, key, client_ca, load=_read_configuration, log=_log)

    def bind(self, server: grpc.Server | grpc.aio.Server, address: str) -> int:
        """Has a server listen with them; returns the port.

        Raises:
            InvalidRequestError: gRPC does not take the certificates: it looks into the keys of authorities, too.
            RuntimeError: The address is taken.
        """
        try:
            return server.add_secure_port(address, self._make_credentials())
        except RuntimeError:  # the same in both cases
            try:
                server.add_secure_port("127.0.0.1:0", self._make_credentials())
            except RuntimeError as fault:
                reason = f"gRPC cannot use these certificates: {', '.join(self._paths)}"
                raise InvalidRequestError(argument="tls_cert", reason=reason) from fault
            raise

    def _make_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of gRPC, which ask for the files at every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._files.loaded, self._fetch, require_client_authentication=self._asks_clients
        )

    def _fetch(self) -> Any:
        """Returns the configuration for the next handshakes; None for the present one."""
        if not self._files.renew():
            return None
        _log.info("the certificates have changed: %s is in use from now on", self._cert)
        return self._files.loaded


def _read_configuration(cert: str, key: str, client_ca: str | None) -> Any:
    make_server_context("tls_cert", cert, key, client_ca)
    pair = (read_pem("tls_key", key), read_pem("tls_cert", cert))
    ca = None if client_ca is None else read_pem("tls_client_ca", client_ca)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


def open_grpc_channel(address: str, tls: TLS | None, options: list[tuple[str, Any]]) -> grpc.Channel:
    """Opens a channel; encrypted if there is TLS.

    Raises:
        InvalidRequestError: A file of it cannot be read.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    files = tls.read()
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=[*options, *named])
