"""A client on the server's machine, in a world: its lock, its end of the socket, and the messages that it receives."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from types import TracebackType
from typing import Any

import pytest

from tdserve.base.errors import PeerLostError
from tdserve.base.ids import make_client_id
from tdserve.control.framing import FrameReader
from tdserve.control.local import LocalConnection
from tdserve.control.servicer import SessionConnection
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.server.movers.choosing import make_channel_movers, make_local_movers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import Invitation, LocalClient
from tdserve.store.exchange.session_locks import SessionLock
from tdserve.v1 import control_pb2
from tests.unit.server.world import INLINE_BYTES, Outbox, World

WAIT_S = 20.0


class LocalPeer:
    """A local client; enter it on the event loop.

    Args:
        world: The world with its server.
        number: Session number.
        is_read_only: Whether it has no write access; then it holds no lock.
        lacks_values: Whether its Hello reports that it cannot read values.

    Attributes:
        session: The server's session.
        local: The session's local client.
    """

    session: ClientSession
    local: LocalClient

    def __init__(
        self, world: World, number: int = 1, *, is_read_only: bool = False, lacks_values: bool = False
    ) -> None:
        self._world = world
        self._number = number
        self._attach = control_pb2.Attach(is_read_only=is_read_only, lacks_values=lacks_values)
        self._invitation = Invitation.make()
        self._messages: list[control_pb2.ServerMessage] = []
        self._reader = FrameReader()
        self._lock: SessionLock | None = None

    @property
    def lock_name(self) -> str:
        """Name of the lock file that it holds."""
        return self._invitation.lock_name

    async def __aenter__(self) -> LocalPeer:
        world, loop = self._world, asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        _, connection = await loop.create_connection(
            lambda: LocalConnection(lambda connection, message: None, lambda connection: None), sock=theirs
        )
        lock_name = ""
        if not self._attach.is_read_only:
            self._lock = SessionLock.hold(world.root.sessions_folder, self.lock_name)
            lock_name = self.lock_name
        hello = control_pb2.Hello(client_id=make_client_id(), transport="shm")
        self.session = ClientSession(
            self._number,
            hello,
            SessionConnection(Outbox()),
            make_movers=partial(make_channel_movers, world.mover_context),
            worker=world.worker,
            interface="127.0.0.1",
            inline_bytes=INLINE_BYTES,
            invitation=self._invitation,
        )
        self.local = LocalClient(
            self._number,
            connection,
            self._attach,
            lock_name=lock_name,
            is_gone=world.process_watch.is_gone,
            sessions_folder=world.root.sessions_folder,
        )
        self.session.attach(self.local, make_local_movers(world.mover_context, self.session, self.local))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self.session.ended.set()
        await self.session.finish(5.0)
        await asyncio.sleep(0)  # the connection's own end
        self._socket.close()

    async def receive(self) -> control_pb2.ServerMessage:
        """Returns the next message from the server."""
        while not self._messages:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, 1 << 16), WAIT_S)
            assert data, "the server has let go"
            self._messages += [control_pb2.ServerMessage.FromString(each) for each in self._reader.feed(data)]
        return self._messages.pop(0)

    async def is_let_go(self) -> bool:
        """Returns whether the server has closed the connection without a further message."""
        return not self._messages and await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16) == b""

    async def accepted(self) -> control_pb2.Accepted:
        """Returns the message that permits its write."""
        message = await self.receive()
        assert message.HasField("accepted"), message
        return message.accepted

    def done(self, request: int = 1, **fields: Any) -> None:
        """Reports that the permitted work is done, or will not be."""
        self.local.on_written(request, control_pb2.Written(**fields))

    async def leave(self) -> None:
        """Ends the session; its process goes on."""
        self.session.ended.set()
        await self.session.finish(5.0)

    async def leave_in(self, write: asyncio.Task[control_pb2.Done]) -> None:
        """Ends the session in the middle of a write, which fails with it."""
        await self.leave()
        with pytest.raises(PeerLostError):
            await write

    def let_go(self) -> None:
        """Ends its process."""
        if self._lock is not None:
            self._lock.release()


def mapped(store: OpenedStore) -> MappedStore:
    """Returns the files of a store as a client maps them."""
    stores = OpenStores(writes_values=False)
    return stores.get(store.make_ref(WorkerSpecCache(lambda: None)), store.spec)
