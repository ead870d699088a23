"""TLS of gRPC, made of our settings: of a server, which reads its files again when they change, and of a client."""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

import grpc

from tdserve.base.errors import InvalidRequestError
from tdserve.base.tls import TLS, find_version, make_server_context, read_pem

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
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = Lock()
        self._version = find_version(cert, key, client_ca)
        self._first = self._read()

    def make_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of gRPC, which ask for the files at every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._fetch, require_client_authentication=self._client_ca is not None
        )

    def _fetch(self) -> Any:
        """Returns the configuration for the next handshakes; None for the present one."""
        with self._lock:
            version = find_version(self._cert, self._key, self._client_ca)
            if version == self._version:
                return None
            self._version = version
            try:
                found = self._read()
            except InvalidRequestError as error:
                _log.warning("the certificates have changed and cannot be used, the former ones stay: %s", error)
                return None
            _log.info("the certificates have changed: %s is in use from now on", self._cert)
            return found

    def _read(self) -> Any:
        make_server_context("tls_cert", self._cert, self._key, self._client_ca)
        pair = (read_pem("tls_key", self._key), read_pem("tls_cert", self._cert))
        ca = None if self._client_ca is None else read_pem("tls_client_ca", self._client_ca)
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
