from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tdserve.base.errors import (
    LocalProtocolError,
    StoreNotFoundError,
    TDServeError,
    UnauthenticatedError,
    list_error_classes,
)
from tdserve.control.connection import ControlConnection
from tdserve.control.control_pb2_grpc import ControlServiceStub
from tdserve.control.parts import MAX_RECEIVED_BYTES
from tdserve.control.servicer import SERVICE_NAME, ControlServer
from tdserve.v1 import control_pb2
from tests.unit.control.serving import Answering, same, serving

TIMEOUT_S = 30.0
SERVICE_PATH = f"/{SERVICE_NAME}"

EVERY_ERROR: dict[str, Exception] = {name: cls() for name, cls in list_error_classes().items()}


@pytest.fixture(scope="module")
def connection() -> Iterator[ControlConnection]:
    """A connection to a server that raises any error of ours by its name, and ``ZeroDivisionError`` for "fault"."""
    with serving(Answering(EVERY_ERROR | {"fault": ZeroDivisionError("by zero")})) as address:
        made = ControlConnection(address)
        yield made
        made.close()


@pytest.mark.parametrize("name", [name for name in EVERY_ERROR if name not in ("ConnectError", "UnauthenticatedError")])
def test_handler_when_it_raises_then_the_caller_gets_the_same_error(connection: ControlConnection, name: str) -> None:
    expected = EVERY_ERROR[name]
    assert isinstance(expected, TDServeError)
    with pytest.raises(type(expected)) as raised:
        connection.call("DescribeStore", control_pb2.DescribeStoreRequest(name=name), timeout_s=TIMEOUT_S)
    assert same(raised.value, expected)


METHODS: list[tuple[str, Any, Any]] = [
    ("DescribeStore", control_pb2.DescribeStoreRequest(name="a"), control_pb2.StoreDescription(name="a")),
    ("ListStores", control_pb2.ListStoresRequest(prefix="a"), control_pb2.ListStoresResponse(names=["a"])),
    ("ListKeys", control_pb2.ListKeysRequest(name="a"), control_pb2.ListKeysResponse(keys=["k"])),
    ("GetStats", control_pb2.GetStatsRequest(), control_pb2.GetStatsResponse(server_id="test")),
    ("Observe", control_pb2.ObserveRequest(), control_pb2.ObserveResponse(server_id="test")),
]


@pytest.mark.parametrize(("method", "request_", "expected"), METHODS, ids=[method for method, _, _ in METHODS])
def test_method_when_called_then_its_handler_answers(
    connection: ControlConnection, method: str, request_: Any, expected: Any
) -> None:
    assert connection.call(method, request_, timeout_s=TIMEOUT_S) == expected


def test_handler_when_it_has_a_fault_then_logged_and_sent_to_the_client(
    connection: ControlConnection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(LocalProtocolError, match="ZeroDivisionError: by zero"):
        connection.call("DescribeStore", control_pb2.DescribeStoreRequest(name="fault"), timeout_s=TIMEOUT_S)
    assert "a handler failed" in caplog.text


@pytest.mark.parametrize("token", [None, "wrong", "secre", "secret2"])
def test_call_when_the_token_is_wrong_then_refused(token: str | None) -> None:
    with serving(Answering(), token="secret") as address:
        connection = ControlConnection(address, token=token)
        with pytest.raises(UnauthenticatedError):
            connection.call("GetStats", control_pb2.GetStatsRequest(), timeout_s=TIMEOUT_S)
        connection.close()


def test_call_when_the_token_is_right_then_answered() -> None:
    with serving(Answering({"x": StoreNotFoundError(name="x")}), token="secret") as address:
        connection = ControlConnection(address, token="secret")
        with pytest.raises(StoreNotFoundError):
            connection.call("DescribeStore", control_pb2.DescribeStoreRequest(name="x"), timeout_s=TIMEOUT_S)
        connection.close()


def test_call_when_the_token_is_wrong_then_refused_before_its_message_has_come() -> None:
    """The client never ends its request: a server that waited for all of it would not answer."""
    with serving(Answering(), token="secret") as address, grpc.insecure_channel(address) as channel:
        for method in ("DescribeStore", "GetStats"):
            call: Any = channel.stream_unary(f"{SERVICE_PATH}/{method}")  # type: ignore[call-arg]
            with pytest.raises(grpc.RpcError) as raised:
                call(endless(), timeout=TIMEOUT_S)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_when_asked_without_the_token_then_answered_unread_and_not_watched() -> None:
    with serving(Answering(), token="secret") as address, grpc.insecure_channel(address) as channel:
        check: Any = channel.stream_unary(  # type: ignore[call-arg]
            "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        assert check(endless(), timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch
        with pytest.raises(grpc.RpcError) as raised:
            next(iter(watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def endless() -> Iterator[bytes]:
    """The requests of a stream that is not ended."""
    sent: SimpleQueue[bytes] = SimpleQueue()
    while True:
        try:
            yield sent.get(timeout=TIMEOUT_S)
        except Empty:
            return


def test_message_when_it_is_larger_than_the_server_receives_then_refused() -> None:
    handlers = Answering()
    large = control_pb2.DescribeStoreRequest(name="x" * (2 * MAX_RECEIVED_BYTES))
    with (
        serving(handlers) as address,
        grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        ControlServiceStub(channel).DescribeStore(large, timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert handlers.asked == []


def test_session_when_the_token_is_wrong_then_lost_with_the_reason() -> None:
    ends: SimpleQueue[TDServeError] = SimpleQueue()
    with serving(Answering(), token="secret") as address:
        connection = ControlConnection(address, token="wrong")
        connection.open_session(on_message=lambda message: None, on_lost=ends.put)
        assert isinstance(ends.get(timeout=TIMEOUT_S), UnauthenticatedError)
        connection.close()


def test_connection_when_the_session_has_ended_then_send_does_nothing() -> None:
    handlers = Answering()
    ends: SimpleQueue[TDServeError] = SimpleQueue()
    with serving(handlers) as address:
        connection = ControlConnection(address)
        stream = connection.open_session(on_message=lambda message: None, on_lost=ends.put)
        stream.send(control_pb2.ClientMessage(request=99))
        ends.get(timeout=TIMEOUT_S)
        assert len(handlers.ended_connections) == 1
        connection.call("ListStores", control_pb2.ListStoresRequest(), timeout_s=TIMEOUT_S)  # sends there
        connection.close()
    assert handlers.peers[0].startswith("ipv4:127.0.0.1:")


def test_reflection_when_asked_then_lists_our_service() -> None:
    with serving(Answering()) as address, grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
    assert SERVICE_NAME in [service.name for service in answer.list_services_response.service]


def test_server_when_port_is_zero_then_takes_a_free_one() -> None:
    with serving(Answering()) as first, serving(Answering()) as second:
        assert first != second
        assert not first.endswith(":0")


def test_server_when_the_port_is_taken_then_refused() -> None:
    async def listen(port: int) -> None:
        ControlServer(Answering(), host="127.0.0.1", port=port)

    with serving(Answering()) as address, pytest.raises(RuntimeError):
        asyncio.run(listen(int(address.rpartition(":")[2])))


def test_log_when_a_client_vanished_while_its_call_was_ended_then_nothing_is_said(
    connection: ControlConnection, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    with caplog.at_level(logging.ERROR, logger.name):
        for fault in (cygrpc.ExecuteBatchError("its client is gone"), ZeroDivisionError("by zero")):
            logger.error("in a servicer's method", exc_info=fault)
    assert "by zero" in caplog.text
    assert "its client is gone" not in caplog.text
