"""Certificates: those that a client or a server presents and trusts, and what a failed handshake means."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from tdserve.base.addresses import parse_address
from tdserve.base.errors import InvalidRequestError

PROBE_TIMEOUT_S = 1.0
"""Time for a handshake that finds out why another one failed."""

ALPN = ["h2"]
"""What gRPC asks for; its servers refuse others."""

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class TLS:
    """TLS of a client: an encrypted connection to a server that proves its name. All files are PEM.

    The files are read whenever a connection is made, so they may be replaced while a client runs.

    Attributes:
        ca: File with the certificates of the authorities that sign the server's; None takes those that gRPC knows.
        cert: File with the client's own certificate, for servers that ask for one (``--tls-client-ca``).
        key: File with its private key.
        server_name: Name that the server's certificate must have; None takes the host of the address.

    Raises:
        InvalidRequestError: One of ``cert`` and ``key`` is given without the other.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError(argument="tls", reason="cert and key belong together: give both or none")

    def read(self) -> PemFiles:
        """Reads the files.

        Raises:
            InvalidRequestError: One cannot be read, or does not hold what it should.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ca = None if self.ca is None else _load_authorities(context, "tls", self.ca)
        if self.cert is None or self.key is None:
            return PemFiles(ca)
        cert, key = _load_chain(context, "tls", self.cert, self.key)
        return PemFiles(ca, key, cert)

    def find_version(self) -> tuple[int, ...]:
        """Returns numbers that differ once a file has changed."""
        return find_version(self.ca, self.cert, self.key)


class PemFiles(NamedTuple):
    """Contents of files.

    Attributes:
        ca: Certificates of authorities.
        key, cert: A private key, and the chain of certificates for it.
    """

    ca: bytes | None
    key: bytes | None = None
    cert: bytes | None = None


def read_pem(argument: str, path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a PEM file.

    Args:
        argument: The option that names it, for the error.
        path: Its path.

    Raises:
        InvalidRequestError: It cannot be read, or holds nothing of that kind.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as fault:
        raise InvalidRequestError(argument=argument, reason=f"cannot read {path}: {fault.strerror}") from fault
    if b"-----BEGIN " not in content:
        raise InvalidRequestError(argument=argument, reason=f"{path} is not a PEM file")
    return content


def find_version(*paths: str | os.PathLike[str] | None) -> tuple[int, ...]:
    """Returns numbers that differ once one of these files has changed; 0 for a file that is missing."""
    found = []
    for path in paths:
        try:
            status = os.stat(path) if path is not None else None
        except OSError:
            status = None
        found += [0, 0] if status is None else [status.st_mtime_ns, status.st_ino]
    return tuple(found)


def make_server_context(argument: str, cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """Returns a context of what a server presents and trusts; clients need a certificate if ``client_ca`` is given.

    Args:
        argument: The option that names the files, for the error.
        cert, key: PEM files of its own certificate.
        client_ca: PEM file of the authorities for clients.

    Raises:
        InvalidRequestError: One cannot be read, or the key is not that of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, argument, cert, key)
    if client_ca is not None:
        _load_authorities(context, argument.replace("tls_cert", "tls_client_ca"), client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(
    context: ssl.SSLContext, argument: str, cert: str | os.PathLike[str], key: str | os.PathLike[str]
) -> tuple[bytes, bytes]:
    """Returns the contents of both files."""
    contents = read_pem(argument, cert), read_pem(argument, key)
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except (OSError, ValueError) as fault:  # an error of ssl is an OSError
        reason = f"{cert} with {key} is not a certificate with its key: {fault}"
        raise InvalidRequestError(argument=argument, reason=reason) from fault
    return contents


def _load_authorities(context: ssl.SSLContext, argument: str, path: str | os.PathLike[str]) -> bytes:
    """Returns the content of the file."""
    content = read_pem(argument, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as fault:
        reason = f"{path} has no certificates of authorities: {fault}"
        raise InvalidRequestError(argument=argument, reason=reason) from fault
    return content


class ServerFiles(Generic[_Loaded]):
    """What is made of the PEM files of a server, rebuilt when they change. Threads: safe.

    Args:
        cert, key: PEM files of its own certificate.
        client_ca: PEM file of the authorities for clients; None asks clients for no certificate.
        load: Makes it of these.
        log: Gets a warning when changed files cannot be used, and when clients will refuse the certificate.

    Attributes:
        loaded: What was made last.

    Raises:
        InvalidRequestError: They cannot be used.
    """

    def __init__(
        self,
        cert: str,
        key: str,
        client_ca: str | None,
        *,
        load: Callable[[str, str, str | None], _Loaded],
        log: logging.Logger,
    ) -> None:
        self._files = cert, key, client_ca
        self._load, self._log = load, log
        self._lock = Lock()
        self._version = find_version(*self._files)
        self.loaded = load(*self._files)
        self._warn_of_refusal()

    def renew(self) -> bool:
        """Rebuilds it if a file has changed, and returns whether it did; what cannot be used is left alone."""
        with self._lock:
            version = find_version(*self._files)
            if version == self._version:
                return False
            self._version = version
            try:
                self.loaded = self._load(*self._files)
            except InvalidRequestError as error:
                self._log.warning("the certificates have changed and cannot be used, the former ones stay: %s", error)
                return False
            self._warn_of_refusal()
            return True

    def _warn_of_refusal(self) -> None:
        cert, key, _ = self._files
        if reason := explain_refusal(cert, key):
            self._log.warning("clients will refuse the certificate %s: %s", cert, reason)


def explain_refusal(cert: str, key: str) -> str:
    """Returns why every client refuses the certificate of a server, such as "certificate has expired"; "" if only its
    authority and name decide, or if it changes just now.

    A handshake in memory finds it out, in which the client trusts the certificate itself: ``ssl`` cannot show the times
    of a certificate that is no authority's.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        _load_chain(server, "tls_cert", cert, key)
        client.load_verify_locations(cert)
        ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
        for end in (*ends, *ends):  # the client's hello, the server's answer, the client's opinion of it
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as fault:
        return fault.verify_message
    except (InvalidRequestError, OSError):
        return ""
    return ""


def _refuse_password() -> str:
    """Keeps openssl from asking on the terminal; the key then counts as unreadable."""
    return ""


def explain_refused(address: str, tls: TLS | None, *, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """Returns why a server refuses this client, and what to do.

    It returns "" if the server does not refuse it, or if that cannot be found out: the port is closed, or what
    listens closes the connection without a word, as a port forwarder does whose server has not started yet.

    Args:
        address: ``host:port``.
        tls: The client's.
        timeout_s: For each step of the handshake that finds it out.
    """
    host, port = parse_address("address", address)
    try:
        if tls is None:
            _shake_hands(host, port or 0, _make_trusting_context(), host, timeout_s)
            return _NO_TLS
        if not _shake_hands(host, port or 0, _make_context(tls), tls.server_name or host, timeout_s):
            return "the server refuses the client's certificate" if tls.cert is not None else _NO_CERTIFICATE
    except ssl.SSLCertVerificationError as fault:
        return f"the server's certificate was refused: {fault.verify_message}"
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError as fault:
        if tls is None:  # it has no TLS either
            return ""
        return f"no TLS handshake: {fault.reason or fault}; does the server have TLS (--tls-cert)?"
    except (OSError, ValueError):
        return ""
    return ""


_NO_TLS = "the server asks for TLS: pass tls=tdserve.TLS(ca=), or set TDSERVE_TLS_CA"

_NO_CERTIFICATE = (
    "the server asks for a client certificate: pass tls=tdserve.TLS(ca=, cert=, key=), or set TDSERVE_TLS_CA, "
    "TDSERVE_TLS_CERT and TDSERVE_TLS_KEY"
)


def _make_trusting_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one reads all authorities of the system: 0.1 s
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(ALPN)
    return context


def _make_context(tls: TLS) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca is None else os.fspath(tls.ca))
    context.set_alpn_protocols(ALPN)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password=_refuse_password)
    return context


def _shake_hands(host: str, port: int, context: ssl.SSLContext, name: str, timeout_s: float) -> bool:
    """Returns whether the server continues after the client's end of the handshake: it refuses the client's certificate
    only then, by closing."""
    with (
        socket.create_connection((host.strip("[]"), port), timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=name.strip("[]")) as encrypted,
    ):
        try:
            return bool(encrypted.recv(1))
        except (ssl.SSLError, ConnectionError):
            return False
