"""Errors of bytes that did not arrive, and of messages that break the protocol."""

from __future__ import annotations

from tdserve.base.errors.tdserve_error import TDServeError


class TransportError(TDServeError):
    """Bytes did not arrive. The session is closed; the next call opens a fresh one."""

    code = "UNAVAILABLE"
    retryable = True


class ConnectError(TransportError, ConnectionError):
    """No session could be opened. Nothing was sent."""

    template = "no connection to {address}: {reason}"
    defaults = {"address": "", "reason": ""}


class HandshakeRefusedError(ConnectError):
    """The server, or this client, does not trust the other's certificate, or only one of them uses TLS. Raised only by
    connections that were never answered: others wait, since certificates are replaced while they are in use."""

    retryable = False


class NotLocalError(ConnectError):
    """Shared memory was asked for, but this process does not share the server's root. Nothing was sent."""

    retryable = False
    template = "no shared memory with the server at {address}: {reason}"


class NcclUnavailableError(ConnectError):
    """NCCL was asked for, but the GPUs of the two ends cannot use it. Nothing was sent."""

    retryable = False
    template = "no NCCL with the server at {address}: {reason}"


class PeerLostError(TransportError, ConnectionError):
    """The other end went away during a call. A destination that was being filled is undefined."""

    template = "lost {peer}: {reason}"
    defaults = {"peer": "", "reason": ""}


class TransferAbortedError(TransportError):
    """One end of a transfer aborted it. A destination that was being filled is undefined."""

    code = "ABORTED"
    template = "the transfer was aborted: {reason}"
    defaults = {"transfer": 0, "reason": ""}

    def _make_message(self) -> str:
        number = self.fields["transfer"]
        template = self.template.replace("the transfer", f"transfer {number}", 1) if number else self.template
        return template.format(**self.fields)


class ProtocolError(TDServeError):
    """A message broke the protocol book (``proto/README.md``)."""


class LocalProtocolError(ProtocolError):
    """This process would have broken the protocol: a bug of tdserve."""

    template = "bug in this process: {reason}"


class RemoteProtocolError(ProtocolError):
    """The other end broke the protocol: it has a bug, or is not tdserve. As an answer: the request did."""

    code = "INVALID_ARGUMENT"
    template = "the peer broke the protocol: expected {expected}, received {received}"
    defaults = {"expected": "", "received": ""}


class ProtocolVersionError(ProtocolError):
    """Client and server speak different versions of the protocol."""

    code = "FAILED_PRECONDITION"
    template = "the server at {address} speaks protocol {actual}, this client {expected}; both need one tdserve version"
    defaults = {"address": "", "expected": 0, "actual": 0}
