"""The server's end of gRPC. Every method decodes, calls a handler and encodes; errors leave as messages, and faults are
logged."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tdserve.base.addresses import join_address
from tdserve.base.errors import LocalProtocolError, RemoteProtocolError, TDServeError, UnauthenticatedError
from tdserve.base.logs import choose_failure_level, name_request
from tdserve.control.audit import AuditLog
from tdserve.control.connection import CHANNEL_OPTIONS, HANDSHAKE_MS
from tdserve.control.content_relay import ContentConnection
from tdserve.control.content_stream import CONTENT_METHOD
from tdserve.control.control_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server
from tdserve.control.credentials import ServerCertificates
from tdserve.control.parts import MAX_RECEIVED_BYTES
from tdserve.control.status import abort
from tdserve.rules.access.grants import FULL_CALLER, FULL_GRANT, Caller, Grant
from tdserve.v1 import control_pb2

SERVICE_NAME: str = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name

_log = logging.getLogger("tdserve.control")
_Answer = TypeVar("_Answer", bound=Any)


class SessionConnection:
    """The way from the control process to one client; messages of several tasks never mix.

    Attributes:
        caller: The origin of the session, with what its token grants.
        peer: The client's address as gRPC sees it.
    """

    def __init__(self, context: Any, grant: Grant = FULL_GRANT) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self.peer = str(context.peer())  # read now: after the call has ended, grpc.aio crashes the process
        self.caller = Caller(grant, self.peer)

    async def send(self, message: control_pb2.ServerMessage) -> None:
        """Sends one message; does nothing if the stream has ended, which ends the session separately."""
        async with self._lock:
            try:
                await self._context.write(message)
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                return


class Handlers(Protocol):
    """The control process's handler of each method; a handler raises TDServeError if the client made a mistake."""

    async def serve_session(
        self, connection: SessionConnection, messages: AsyncIterator[control_pb2.ClientMessage]
    ) -> None: ...
    async def describe_store(
        self, request: control_pb2.DescribeStoreRequest, caller: Caller
    ) -> control_pb2.StoreDescription: ...
    async def list_stores(
        self, request: control_pb2.ListStoresRequest, caller: Caller
    ) -> control_pb2.ListStoresResponse: ...
    async def list_keys(self, request: control_pb2.ListKeysRequest, caller: Caller) -> control_pb2.ListKeysResponse: ...
    async def get_stats(self, request: control_pb2.GetStatsRequest, caller: Caller) -> control_pb2.GetStatsResponse: ...
    async def observe(self, request: control_pb2.ObserveRequest, caller: Caller) -> control_pb2.ObserveResponse: ...
    async def exchange_content(self, connection: ContentConnection) -> None: ...
    def hold_answer(self, nbytes: int) -> Callable[[], None]:
        """Counts the memory of an answer until what it returns is called: a client may take it slowly, or never."""
        ...


class Authenticator(Protocol):
    """Knows the tokens of a server."""

    def authenticate(self, authorization: bytes) -> Grant:
        """Returns what the token in an ``authorization`` grants; raises UnauthenticatedError."""
        ...

    def find_named(self, authorization: bytes) -> Grant | None:
        """Returns what the entry grants, or granted, that a token names, for logs; None if there is none."""
        ...


class Servicer(ControlServiceServicer):
    """Adapts handlers to gRPC.

    Args:
        handlers: Handlers of all methods.
        tokens: What finds the grant of a caller; None grants everything.
    """

    def __init__(self, handlers: Handlers, tokens: Authenticator | None = None) -> None:
        self._handlers = handlers
        self._tokens = tokens

    async def Session(self, request_iterator: Any, context: Any) -> None:
        async def serve() -> None:
            connection = SessionConnection(context, self._find_caller(context).grant)
            await self._handlers.serve_session(connection, request_iterator)

        await _answer(serve(), context)

    async def DescribeStore(self, request: control_pb2.DescribeStoreRequest, context: Any) -> Any:
        return await self._call(self._handlers.describe_store, request, context)

    async def ListStores(self, request: control_pb2.ListStoresRequest, context: Any) -> Any:
        return await self._call(self._handlers.list_stores, request, context)

    async def ListKeys(self, request: control_pb2.ListKeysRequest, context: Any) -> Any:
        return await self._call(self._handlers.list_keys, request, context)

    async def GetStats(self, request: control_pb2.GetStatsRequest, context: Any) -> Any:
        return await self._call(self._handlers.get_stats, request, context)

    async def Observe(self, request: control_pb2.ObserveRequest, context: Any) -> Any:
        return await self._call(self._handlers.observe, request, context)

    async def _call(self, handler: Callable[[Any, Caller], Awaitable[_Answer]], request: Any, context: Any) -> _Answer:
        async def serve() -> _Answer:
            answer = await handler(request, self._find_caller(context))
            release = self._handlers.hold_answer(answer.ByteSize())
            context.add_done_callback(lambda _: release())
            return answer

        return await _answer(serve(), context)

    def _find_caller(self, context: Any) -> Caller:
        """Returns the origin of a call. Its token was right when the call came, and may have ended since."""
        if self._tokens is None:
            return FULL_CALLER._replace(peer=context.peer())
        return Caller(self._tokens.authenticate(_find_authorization(context.invocation_metadata())), context.peer())


def _make_content_handler(handlers: Handlers) -> Any:
    """Returns the service whose messages are bytes."""

    async def exchange(_: Any, context: Any) -> None:
        async def serve() -> None:
            await handlers.exchange_content(ContentConnection(context))

        await _answer(serve(), context)

    service, method = CONTENT_METHOD.strip("/").split("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(exchange)})


async def _answer(handler: Awaitable[_Answer], context: Any) -> _Answer:
    try:
        return await handler
    except TDServeError as error:
        request_id = f"call-{secrets.token_hex(4)}"
        extra = name_request(request_id)
        _log.log(choose_failure_level(error), "a call has failed: %s: %s", error.code, error, extra=extra)
        await abort(context, error, request_id=request_id)
    except Exception as fault:  # noqa: BLE001 (the boundary of the service)
        request_id = f"call-{secrets.token_hex(4)}"
        _log.exception("a handler failed", extra=name_request(request_id))
        failure = LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500])
        await abort(context, failure, request_id=request_id)


def _find_authorization(metadata: Any) -> bytes:
    given = next((value for key, value in metadata if key == "authorization"), "")
    return given.encode() if isinstance(given, str) else bytes(given)


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every call without a valid token, before a byte of its messages is received.

    A health check without it is answered unread too, since an orchestrator has no token: it gets the state of the whole
    server, whichever service it asked for.
    """

    def __init__(
        self,
        tokens: Authenticator,
        audit: AuditLog,
        address: str,
        status: Callable[[], health_pb2.HealthCheckResponse],
    ) -> None:
        self._tokens = tokens
        self._audit = audit
        self._address = address
        self._status = status

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return handler
        authorization = _find_authorization(details.invocation_metadata)
        try:
            self._tokens.authenticate(authorization)
        except UnauthenticatedError as error:
            if details.method == _HEALTH_CHECK:
                return _answer_unread(self._check, handler)
            refusal = UnauthenticatedError(address=self._address, reason=error.reason)
            named = self._tokens.find_named(authorization)
            return _answer_unread(partial(self._refuse, refusal, named, details.method), handler)
        return handler

    async def _check(self, messages: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return self._status()

    async def _refuse(
        self, refusal: UnauthenticatedError, named: Grant | None, method: str, messages: Any, context: Any
    ) -> NoReturn:
        self._audit.note_stranger(context.peer(), refusal, named=named, method=method)
        await abort(context, refusal)


_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


def _answer_unread(answer: Callable[[Any, Any], Awaitable[Any]], handler: Any) -> Any:
    """Returns a handler that answers in place of another and receives nothing. It is a handler of a stream of requests
    that reads none, since gRPC calls a handler of one request only when the whole request has arrived and was
    parsed."""
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(answer, handler.request_deserializer, handler.response_serializer)


class _Decoding(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses messages that cannot be decoded. gRPC would answer UNKNOWN, and log a fault of the server."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = partial(_decode, handler.request_deserializer, _NONE if handler.request_streaming else None)
        if handler.unary_unary is None:
            return handler._replace(request_deserializer=decode)
        return handler._replace(request_deserializer=decode, unary_unary=partial(_answer_decoded, handler.unary_unary))


_NONE = control_pb2.ClientMessage(part=control_pb2.MessagePart(content=b"\xff" * 9, is_last=True))
"""Replaces a message that cannot be decoded: a part without a whole, on which the session ends."""


def _decode(deserialize: Callable[[bytes], Any], otherwise: Any, content: bytes) -> Any:
    try:
        return deserialize(content)
    except DecodeError:
        return otherwise


async def _answer_decoded(answer: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
    if request is None:
        await abort(context, RemoteProtocolError(expected="a message of this call", received="other bytes"))
    return await answer(request, context)


class _GoneClients(logging.Filter):
    """Drops the traceback that gRPC logs if a client vanishes at the moment in which its call is ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or kind.__name__ != "ExecuteBatchError"


_GONE_CLIENTS = _GoneClients()


_SERVER_OPTIONS: dict[str, Any] = {
    "grpc.so_reuseport": 0,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    "grpc.max_receive_message_length": MAX_RECEIVED_BYTES,
    # Limit for one connection: a client has its session, and a call for each thread that waits for a store.
    "grpc.max_concurrent_streams": 1_000,
    # Idle connections hold descriptors for this long; the limit of descriptors is raised as far as allowed.
    "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
    # A client reopens a connection without calls at no cost.
    "grpc.max_connection_idle_ms": 60_000,
}


class ControlServer:
    """The listening gRPC server: our service, standard health, reflection.

    Args:
        handlers: Handlers of all methods.
        host: Address to listen on.
        port: 0 takes a free one, which the attribute ``port`` then has.
        tokens: Knows the bearer tokens, one of which every call but health must carry; None asks for none.
        certificates: For TLS; None for none.
        has_local_port: Whether to listen, without TLS, on another port too, which only this machine reaches: the
            attribute ``local_port``, which is ``port`` without TLS.
        audit: Notes refusals.
    """

    def __init__(
        self,
        handlers: Handlers,
        *,
        host: str,
        port: int,
        tokens: Authenticator | None = None,
        certificates: ServerCertificates | None = None,
        has_local_port: bool = False,
        audit: AuditLog | None = None,
    ) -> None:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_GONE_CLIENTS)
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        check = tokens and _TokenCheck(tokens, audit or AuditLog(), f"{host}:{port}", self._get_health)
        interceptors = [check, _Decoding()] if check else [_Decoding()]
        options = list({**dict(CHANNEL_OPTIONS), **_SERVER_OPTIONS}.items())  # grpc takes the first of a name
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        add_ControlServiceServicer_to_server(Servicer(handlers, tokens), self._server)
        self._server.add_generic_rpc_handlers((_make_content_handler(handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        address = join_address(host, port)
        if certificates is None:
            self.port = self.local_port = self._server.add_insecure_port(address)
        else:
            self.port = certificates.bind(self._server, address)
            self.local_port = self._server.add_insecure_port("127.0.0.1:0") if has_local_port else 0

    async def start(self) -> None:
        """Starts to listen; health reports NOT_SERVING until ``set_serving``."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the answer of the health service."""
        answer = health_pb2.HealthCheckResponse
        self._status = answer.SERVING if is_serving else answer.NOT_SERVING
        await self._health.set("", self._status)
        await self._health.set(SERVICE_NAME, self._status)

    def _get_health(self) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=self._status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones ``grace_s`` seconds, then ends them."""
        await self._server.stop(grace_s)
