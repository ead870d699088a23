from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from tdserve.base.errors import (
    CapacityError,
    ConnectError,
    DeadlineExceededError,
    Field,
    PeerLostError,
    RemoteProtocolError,
    StoreNotFoundError,
    TDServeError,
    UnauthenticatedError,
    list_error_classes,
)
from tdserve.control.status import ERROR_METADATA_KEY, decode_failure, encode_failure, from_rpc_error
from tdserve.v1 import control_pb2
from tests.unit.control.serving import same


class Failed(grpc.RpcError):
    """A failed call as gRPC shows it."""

    def __init__(self, code: grpc.StatusCode, *metadata: tuple[str, bytes], details: str = "told by grpc") -> None:
        self._code = code
        self._metadata = metadata
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


def example(cls: type[TDServeError]) -> TDServeError:
    """An error of the class, with a value of its own in every field."""
    texts = {name: f"{name} of {cls.__name__}" for name, value in cls.defaults.items() if isinstance(value, str)}
    numbers = {name: 17 + place for place, (name, value) in enumerate(cls.defaults.items()) if name not in texts}
    return cls(**texts, **numbers)


@pytest.mark.parametrize("cls", list_error_classes().values(), ids=list(list_error_classes()))
def test_error_when_it_crosses_the_wire_then_equal(cls: type[TDServeError]) -> None:
    sent = encode_failure(example(cls)).SerializeToString()
    assert same(decode_failure(control_pb2.Failure.FromString(sent)), example(cls))


@pytest.mark.parametrize("cls", list_error_classes().values(), ids=list(list_error_classes()))
def test_error_when_it_has_a_code_then_grpc_has_the_same(cls: type[TDServeError]) -> None:
    assert isinstance(getattr(grpc.StatusCode, cls.code), grpc.StatusCode)


@pytest.mark.parametrize("value", [None, True, False, 0, -(2**63), 2**63 - 1, 2.5, -0.0, math.inf, "", "ä\n"])
def test_field_when_of_any_kind_then_survives(value: Field) -> None:
    found = decode_failure(encode_failure(CapacityError(asked=value))).fields["asked"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("value", "shown"), [(2**63, str(2**63)), ("\ud800", "?")])
def test_field_when_it_fits_no_message_then_arrives_as_text(value: Field, shown: str) -> None:
    assert decode_failure(encode_failure(CapacityError(asked=value))).fields["asked"] == shown


def test_failure_when_its_class_is_unknown_then_remote_protocol_error() -> None:
    error = decode_failure(control_pb2.Failure(error="FutureError"))
    assert isinstance(error, RemoteProtocolError)
    assert error.received == "FutureError"


def test_failure_when_it_has_an_unknown_field_then_the_rest_arrives() -> None:
    failure = encode_failure(StoreNotFoundError(name="x"))
    failure.fields["novelty"].text = "y"
    assert same(decode_failure(failure), StoreNotFoundError(name="x"))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, ConnectError(address="host:1", reason="told by grpc")),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError(what="ListStores at host:1", timeout_s=2.0)),
        (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError(address="host:1")),
        (grpc.StatusCode.CANCELLED, PeerLostError(peer="the server at host:1", reason="ListStores was cancelled")),
    ],
)
def test_rpc_error_when_grpc_itself_failed_then_its_meaning(code: grpc.StatusCode, expected: TDServeError) -> None:
    assert same(from_rpc_error(Failed(code), address="host:1", what="ListStores", timeout_s=2.0), expected)


def test_rpc_error_when_the_port_is_closed_then_the_message_asks_whether_a_server_runs() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    error = from_rpc_error(
        Failed(grpc.StatusCode.UNAVAILABLE, details=details), address="host:1", what="ListStores", timeout_s=2.0
    )
    assert str(error) == (
        "no connection to host:1: connection refused; is a server running there? (tdserve serve ROOT)"
    )


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "Stream removed (ping timeout)",
            "it does not answer any more; is a server running there? (tdserve serve ROOT)",
        ),
        (
            "recvmsg:Connection reset by peer",
            "the connection was closed; is a server running there? (tdserve serve ROOT)",
        ),
        (
            "last error: UNKNOWN: ipv4:1.2.3.4:1: connection attempt timed out before receiving SETTINGS frame",
            "it listens there and does not answer; the server may be starting, or busy",
        ),
        ("something new", "something new"),
    ],
)
def test_rpc_error_when_there_is_no_connection_then_the_cause_in_plain_words(details: str, reason: str) -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, details=details), address="h:1", what="x", timeout_s=2.0)
    assert str(error) == f"no connection to h:1: {reason}"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_rpc_error_when_tdserve_never_raises_it_then_remote_protocol_error(code: grpc.StatusCode) -> None:
    error = from_rpc_error(Failed(code), address="host:1", what="ListStores", timeout_s=2.0)
    assert isinstance(error, RemoteProtocolError)
    assert "host:1" in error.expected


def test_rpc_error_when_the_server_sent_ours_then_that() -> None:
    ours = StoreNotFoundError(name="x")
    failed = Failed(grpc.StatusCode.NOT_FOUND, (ERROR_METADATA_KEY, encode_failure(ours).SerializeToString()))
    assert same(from_rpc_error(failed, address="", what="", timeout_s=0.0), ours)


def test_rpc_error_when_it_has_no_code_then_remote_protocol_error() -> None:
    assert isinstance(from_rpc_error(grpc.RpcError(), address="", what="", timeout_s=0.0), RemoteProtocolError)


def test_refused_token_when_the_server_has_another_name_for_itself_then_the_address_that_was_used() -> None:
    failure = encode_failure(UnauthenticatedError(address="0.0.0.0:7707")).SerializeToString()
    failed = Failed(grpc.StatusCode.UNAUTHENTICATED, (ERROR_METADATA_KEY, failure))
    found = from_rpc_error(failed, address="server:7707", what="x", timeout_s=1.0)
    assert same(found, UnauthenticatedError(address="server:7707"))
