"""A listening ControlServer whose handlers are written for tests, on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from tdserve.base.errors import TDServeError
from tdserve.control.content_relay import ContentConnection
from tdserve.control.servicer import ControlServer, SessionConnection
from tdserve.rules.access.grants import Caller
from tdserve.server.access.token_register import TokenRegister
from tdserve.v1 import control_pb2

_Answer = TypeVar("_Answer")


class Answering:
    """Handlers that raise the error in ``failures`` for a store of that name."""

    def __init__(self, failures: dict[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.peers: list[str] = []
        self.asked: list[str] = []
        self.exchanging: SimpleQueue[tuple[ContentConnection, socket.socket]] = SimpleQueue()
        self.stopped: list[str] = []
        self.ended_connections: list[SessionConnection] = []
        self.num_unsent = 0

    async def serve_session(
        self, connection: SessionConnection, messages: AsyncIterator[control_pb2.ClientMessage]
    ) -> None:
        """Answers each message with its number; 99 ends the session, and 98 raises an error in it."""
        self.peers.append(connection.peer)
        async for message in messages:
            if message.request == 99:
                break
            if message.request == 98:
                raise self.failures["session"]
            await connection.send(control_pb2.ServerMessage(request=message.request, done=control_pb2.Done(version=7)))
        self.ended_connections.append(connection)

    async def describe_store(
        self, request: control_pb2.DescribeStoreRequest, caller: Caller
    ) -> control_pb2.StoreDescription:
        return self._answer(request.name, control_pb2.StoreDescription(name=request.name))

    async def list_stores(
        self, request: control_pb2.ListStoresRequest, caller: Caller
    ) -> control_pb2.ListStoresResponse:
        for connection in self.ended_connections:
            await connection.send(control_pb2.ServerMessage())
        return control_pb2.ListStoresResponse(names=[request.prefix])

    async def list_keys(self, request: control_pb2.ListKeysRequest, caller: Caller) -> control_pb2.ListKeysResponse:
        return self._answer(request.name, control_pb2.ListKeysResponse(keys=["k"]))

    async def get_stats(self, request: control_pb2.GetStatsRequest, caller: Caller) -> control_pb2.GetStatsResponse:
        return control_pb2.GetStatsResponse(server_id="test")

    async def observe(self, request: control_pb2.ObserveRequest, caller: Caller) -> control_pb2.ObserveResponse:
        return control_pb2.ObserveResponse(server_id="test")

    def hold_answer(self, nbytes: int) -> Callable[[], None]:
        """Counts answers that are on their way."""
        self.num_unsent += 1

        def release() -> None:
            self.num_unsent -= 1

        return release

    async def exchange_content(self, connection: ContentConnection) -> None:
        """Gives the other end of the relayed bytes to the test."""
        ours, theirs = socket.socketpair()
        self.exchanging.put((connection, theirs))
        self.stopped.append(await connection.relay(ours))

    def _answer(self, name: str, answer: _Answer) -> _Answer:
        self.asked.append(name)
        if name in self.failures:
            raise self.failures[name]
        return answer


@contextlib.contextmanager
def serving(handlers: Any, *, port: int = 0, token: str | None = None, is_serving: bool = True) -> Iterator[str]:
    """Yields the address of a server that ends with the block."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="test-control-server")
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30.0)

    async def start() -> ControlServer:
        tokens = None if token is None else TokenRegister(None, token)
        server = ControlServer(handlers, host="127.0.0.1", port=port, tokens=tokens)
        await server.start()
        await server.set_serving(is_serving)
        return server

    try:
        server = run(start())
        yield f"127.0.0.1:{server.port}"
        run(server.stop(0.0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def same(first: TDServeError, second: TDServeError) -> bool:
    """Returns whether two errors have one class and equal fields."""
    return type(first) is type(second) and first.fields == second.fields and str(first) == str(second)
