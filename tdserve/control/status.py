"""Errors in messages and gRPC statuses: a class name and its fields. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    Field,
    PeerLostError,
    RemoteProtocolError,
    TDServeError,
    UnauthenticatedError,
    list_error_classes,
)
from tdserve.v1 import control_pb2

NOBODY_THERE = "is a server running there? (tdserve serve ROOT)"

MAY_BE_BUSY = "the server may be starting, or busy"

MAX_REQUEST_ID = 64
"""Longest id of a request that a client repeats."""

ERROR_METADATA_KEY = "tdserve-failure-bin"
"""Trailing metadata that carries the Failure message of a unary call."""


def encode_failure(error: TDServeError) -> control_pb2.Failure:
    """Returns the message of an error; ``decode_failure`` returns an equal error."""
    failure = control_pb2.Failure(error=type(error).__name__, request_id=error.request_id)
    for name, value in error.fields.items():
        failure.fields[name].CopyFrom(_encode_field(value))
    return failure


def decode_failure(failure: control_pb2.Failure) -> TDServeError:
    """Returns the error of a message. A class that this version does not know becomes a RemoteProtocolError."""
    cls = list_error_classes().get(failure.error)
    if cls is None:
        return RemoteProtocolError(expected="an error of tdserve", received=failure.error[:200])
    fields = {name: _decode_field(value) for name, value in failure.fields.items()}
    error = cls(**{name: value for name, value in fields.items() if name in cls.defaults})
    if failure.request_id.isprintable():
        error.note_request(failure.request_id[:MAX_REQUEST_ID])
    return error


def get_code(failure: control_pb2.Failure) -> str:
    """Returns the code of the error of a message, without building it."""
    return list_error_classes().get(failure.error, RemoteProtocolError).code


def _encode_field(value: Field) -> control_pb2.FailureField:
    if value is None:
        return control_pb2.FailureField(none=True)
    if isinstance(value, bool):
        return control_pb2.FailureField(boolean=value)
    if isinstance(value, int):
        in_range = -(2**63) <= value < 2**63
        return control_pb2.FailureField(integer=value) if in_range else control_pb2.FailureField(text=str(value))
    if isinstance(value, float):
        return control_pb2.FailureField(real=value)
    return control_pb2.FailureField(text=value.encode(errors="replace").decode())


def _decode_field(value: control_pb2.FailureField) -> Field:
    kind = value.WhichOneof("kind")
    if kind in ("boolean", "integer", "real", "text"):
        field: Field = getattr(value, kind)
        return field
    return None


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TDServeError, *, request_id: str = "") -> NoReturn:
    """Ends a unary call with an error; does not return."""
    error.note_request(request_id)
    metadata = ((ERROR_METADATA_KEY, encode_failure(error).SerializeToString()),)
    code = getattr(grpc.StatusCode, error.code)
    await context.abort(code, str(error)[:1000], metadata)
    raise AssertionError("context.abort raises")


def from_rpc_error(error: grpc.RpcError, *, address: str, what: str, timeout_s: float) -> TDServeError:
    """Returns our error for a failed call: the one that the server sent, or one that corresponds to gRPC's status."""
    metadata: Any = getattr(error, "trailing_metadata", tuple)() or ()
    for key, value in metadata:
        if key == ERROR_METADATA_KEY:
            failure = decode_failure(control_pb2.Failure.FromString(value))
            # A server's own address is 0.0.0.0, or a name that means nothing to this client.
            if isinstance(failure, UnauthenticatedError):
                return UnauthenticatedError(address=address, reason=failure.reason)
            return failure
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = str(getattr(error, "details", str)() or "")[:300]
    make = _BY_CODE.get(code)
    if make is not None:
        return make(address, what, timeout_s, details)
    return RemoteProtocolError(expected=f"an answer to {what} from {address}", received=f"{code.name}: {details}")


_CLOSED = f"the connection was closed; {NOBODY_THERE}"

_CAUSES = (
    ("connection refused", f"connection refused; {NOBODY_THERE}"),
    ("connection attempt timed out", f"it listens there and does not answer; {MAY_BE_BUSY}"),
    ("ping timeout", f"it does not answer any more; {NOBODY_THERE}"),
    ("too many open files", "this process may not open a socket: too many open files (ulimit -n)"),
    ("socket closed", _CLOSED),
    ("connection reset", _CLOSED),
    ("broken pipe", _CLOSED),
    ("end of tcp stream", _CLOSED),
    ("goaway", _CLOSED),
)
"""Texts in grpc's reasons, in lower case, and their meanings."""


def _explain(details: str) -> str:
    """Returns the reason for a missing connection, in words that help a user."""
    found = details.lower()
    for text, cause in _CAUSES:
        if text in found:
            return cause
    return details.removeprefix("failed to connect to all addresses; last error: ")


_Make = Callable[[str, str, float, str], TDServeError]

_BY_CODE: dict[grpc.StatusCode, _Make] = {
    grpc.StatusCode.UNAVAILABLE: lambda address, what, timeout_s, details: ConnectError(
        address=address, reason=_explain(details)
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: lambda address, what, timeout_s, details: DeadlineExceededError(
        what=f"{what} at {address}", timeout_s=timeout_s
    ),
    grpc.StatusCode.UNAUTHENTICATED: lambda address, what, timeout_s, details: UnauthenticatedError(address=address),
    grpc.StatusCode.CANCELLED: lambda address, what, timeout_s, details: PeerLostError(
        peer=f"the server at {address}", reason=f"{what} was cancelled"
    ),
    grpc.StatusCode.UNIMPLEMENTED: lambda address, what, timeout_s, details: RemoteProtocolError(
        expected=f"a tdserve server at {address}", received="a server without its service"
    ),
}
