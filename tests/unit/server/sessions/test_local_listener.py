from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tdserve.base.config import PROTOCOL_VERSION, ServerConfig
from tdserve.base.errors import CorruptDataError, InvalidRequestError, PeerLostError, TDServeError
from tdserve.base.ids import make_client_id
from tdserve.base.machine import read_boot_id
from tdserve.control.framing import FrameReader, frame
from tdserve.control.lending import borrow
from tdserve.control.local import SOCKET_NAME
from tdserve.control.servicer import SessionConnection
from tdserve.server.movers.choosing import make_channel_movers, make_local_movers
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import Invitation, LocalClient
from tdserve.server.sessions.local_listener import LocalListener
from tdserve.server.sessions.register import Sessions
from tdserve.store.exchange.session_locks import SessionLock
from tdserve.v1 import control_pb2
from tests.lending_kernel import needs_lending
from tests.unit.server.world import Loop, Outbox, World


class House:
    """A listener and the sessions behind it.

    Attributes:
        taken: Requests that arrived.
    """

    def __init__(self, world: World) -> None:
        self.root = world.root
        (self.root.path / "stores").chmod(0o700)  # as that of a server with tokens
        config = ServerConfig(root=str(world.root.path))
        self.sessions = Sessions(config, [world.worker], world.root, partial(make_channel_movers, world.mover_context))
        self.taken: list[tuple[ClientSession, control_pb2.ClientMessage]] = []
        self.came = asyncio.Event()
        self.door = LocalListener(
            world.root, self.sessions, world.process_watch, partial(make_local_movers, world.mover_context), self._take
        )

    def _take(self, session: ClientSession, message: control_pb2.ClientMessage) -> None:
        self.taken.append((session, message))
        self.came.set()

    async def session(self, transport: str = "shm") -> ClientSession:
        """Opens a session of a client that has said Hello."""
        hello = control_pb2.Hello(
            protocol_version=PROTOCOL_VERSION, client_id=make_client_id(), transport=transport, boot_id=read_boot_id()
        )
        return await self.sessions.open(hello, SessionConnection(Outbox()))

    def lock(self, session: ClientSession) -> SessionLock:
        """Locks the file that the session's client must hold to write."""
        lock = SessionLock.hold(self.root.sessions_folder, invited(session).lock_name)
        assert lock is not None
        return lock


def invited(session: ClientSession) -> Invitation:
    """Returns the invitation that its client received."""
    assert session.invitation is not None
    return session.invitation


class Visitor:
    """A process that connects to the listener."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, **body: Any) -> None:
        """Sends a message."""
        self._writer.write(frame(control_pb2.ClientMessage(**body).SerializeToString()))

    async def receive(self) -> control_pb2.ServerMessage:
        """Returns the next message, which must be the only one."""
        (content,) = FrameReader().feed(await self._reader.read(1 << 16))
        return control_pb2.ServerMessage.FromString(content)

    async def is_let_go(self) -> bool:
        """Returns whether the connection ends without a message."""
        try:
            return await self._reader.read() == b""
        except ConnectionResetError:  # with something that was not even read
            return True

    def hang_up(self) -> None:
        """Ends the connection in the same turn of the loop, so that nobody has read what was sent in it."""
        self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def leave(self) -> None:
        """Closes the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self._writer.wait_closed()

    async def attach(self, who: ClientSession, **fields: Any) -> None:
        """Sends the message that names the session."""
        self.say(attach={"session": who.number, "key": invited(who).key, **fields})


@asynccontextmanager
async def visiting(root: Path) -> AsyncIterator[Visitor]:
    """Connects a visitor during the block."""
    visitor = Visitor(*await asyncio.open_unix_connection(str(root / SOCKET_NAME)))
    yield visitor
    await visitor.leave()


Scenario = Callable[[House], Coroutine[Any, Any, None]]


@pytest.fixture
def within(world: World, run: Loop) -> Callable[[Scenario], None]:
    """Runs a scenario while the listener is open."""

    async def play(scenario: Scenario) -> None:
        house = House(world)
        await house.door.open()
        try:
            await scenario(house)
        finally:
            house.door.close()
            await asyncio.sleep(0)
            for session in house.sessions:
                await house.sessions.close(session)

    return lambda scenario: run(play(scenario))


Within = Callable[[Scenario], None]


def test_attach_when_key_and_lock_are_shown_then_the_session_is_local(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        lock = house.lock(session)
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, lacks_values=True)
            welcome = (await visitor.receive()).welcome
            assert (welcome.session, welcome.transport) == (session.number, "shm")
            assert session.transport == "shm"
            assert isinstance(session.connection, LocalClient)
            assert session.movers.writes.lock_name == invited(session).lock_name
            assert (bool(session.connection.lock_name), session.connection.lacks_values) == (True, True)
        lock.release()

    within(scenario)


@pytest.mark.parametrize("is_ended_first", [False, True])
def test_written_when_its_client_hangs_up_at_once_then_it_counts(within: Within, is_ended_first: bool) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        lock = house.lock(session)
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session)
            await visitor.receive()
            assert isinstance(session.connection, LocalClient)
            writing = [session.connection.let_write(number, control_pb2.Accepted(uid="u")) for number in (4, 5)]
            visitor.say(request=4, written={})
            visitor.hang_up()
            if is_ended_first:
                session.ended.set()
            else:
                await session.connection.send(control_pb2.ServerMessage(request=6))  # fails: it has hung up
            assert await writing[0] == control_pb2.Written()
            with pytest.raises(PeerLostError):
                await writing[1]
        lock.release()

    within(scenario)


def test_attach_when_it_only_reads_then_without_a_lock_and_it_may_not_write(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, is_read_only=True)
            assert (await visitor.receive()).HasField("welcome")
            assert isinstance(session.connection, LocalClient)
            assert not session.connection.lock_name
            assert session.movers.writes.lock_name == ""

    within(scenario)


@pytest.mark.parametrize(
    "fields",
    [{"key": bytes(16)}, {"key": b""}, {"session": 0}, {"session": 99}, {"key": bytes(16), "is_read_only": True}],
)
def test_attach_when_the_key_or_the_session_is_wrong_then_let_go_and_the_session_goes_on(
    within: Within, fields: dict[str, Any]
) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        lock = house.lock(session)
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, **fields)
            assert await visitor.is_let_go()
        assert session.transport == "gloo"
        assert not session.ended.is_set()
        lock.release()

    within(scenario)


def test_attach_when_no_process_holds_the_lock_of_a_writing_client_then_closed(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        for _ in range(2):
            async with visiting(house.root.path) as visitor:
                await visitor.attach(session)
                assert await visitor.is_let_go()
            (house.root.sessions_folder / invited(session).lock_name).touch()  # and nobody locks it
        assert session.transport == "gloo"

    within(scenario)


def test_attach_when_the_session_has_ended_or_wanted_none_then_let_go(within: Within) -> None:
    async def scenario(house: House) -> None:
        ended, network = await house.session(), await house.session("gloo")
        ended.ended.set()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(ended, is_read_only=True)
            assert await visitor.is_let_go()
        async with visiting(house.root.path) as visitor:
            visitor.say(attach={"session": network.number, "is_read_only": True})
            assert await visitor.is_let_go()
        assert network.transport == "gloo"

    within(scenario)


def test_attach_when_one_is_attached_then_the_second_is_closed(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as first, visiting(house.root.path) as second:
            await first.attach(session, is_read_only=True)
            await first.receive()
            local = session.connection
            await second.attach(session, is_read_only=True)
            assert await second.is_let_go()
            assert session.connection is local
            assert not session.ended.is_set()

    within(scenario)


def test_message_when_it_comes_before_attach_then_let_go_and_not_served(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            visitor.say(request=1, read={"store": "x"})
            assert await visitor.is_let_go()
        assert house.taken == []
        assert session.transport == "gloo"

    within(scenario)


def test_message_when_attached_then_requests_are_taken_and_reports_reach_waiting_calls(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, is_read_only=True)
            await visitor.receive()
            assert isinstance(session.connection, LocalClient)
            writing = session.connection.let_write(4, control_pb2.Accepted(uid="u"))
            assert (await visitor.receive()).accepted.uid == "u"
            visitor.say(request=4, written={"columns": [b"c"]})
            assert list((await writing).columns) == [b"c"]
            visitor.say(request=5, read={"store": "x"})
            await house.came.wait()
            ((taker, message),) = house.taken
            assert (taker, message.request, message.read.store) == (session, 5, "x")

    within(scenario)


def test_connection_when_the_client_goes_then_its_session_ends(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, is_read_only=True)
            await visitor.receive()
            assert not session.ended.is_set()
        await session.ended.wait()

    within(scenario)


def test_connection_when_the_session_ends_then_let_go_and_nothing_more_is_taken(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, is_read_only=True)
            await visitor.receive()
            session.ended.set()
            visitor.say(request=5, read={"store": "x"})
            assert await visitor.is_let_go()
        assert house.taken == []

    within(scenario)


def test_close_when_a_client_is_attached_then_it_is_closed_and_the_socket_is_gone(within: Within) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        async with visiting(house.root.path) as visitor:
            await visitor.attach(session, is_read_only=True)
            await visitor.receive()
            house.door.close()
            assert await visitor.is_let_go()
        with pytest.raises(OSError, match=r"refused|No such file"):
            await asyncio.open_unix_connection(str(house.root.path / SOCKET_NAME))

    within(scenario)


def test_open_when_the_root_takes_no_socket_then_said_in_the_log_and_the_server_goes_on(
    world: World, run: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    (world.root.path / SOCKET_NAME).mkdir()
    door = House(world).door
    with caplog.at_level(logging.WARNING):
        run(door.open())
    assert [message for message in caplog.messages if "local clients use the network" in message]
    door.close()


@needs_lending
def test_lend_when_key_and_session_are_shown_then_a_connection_over_which_it_attaches(
    within: Within, world: World
) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        asked = control_pb2.Borrow(session=session.number, key=invited(session).key)
        fd = await asyncio.to_thread(borrow, house.root.nonce, asked)
        visitor = Visitor(*await asyncio.open_unix_connection(sock=socket.socket(fileno=fd)))
        await visitor.attach(session, is_read_only=True, lacks_values=True)
        assert (await visitor.receive()).welcome.transport == "shm"
        assert isinstance(session.connection, LocalClient)
        await visitor.leave()

    within(scenario)


@needs_lending
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"key": bytes(16)}, PeerLostError),
        ({"session": 99}, PeerLostError),
        ({"store": "../x"}, InvalidRequestError),
        ({"store": "none"}, CorruptDataError),
    ],
)
def test_lend_when_what_is_asked_is_wrong_then_refused(
    within: Within, fields: dict[str, Any], error: type[TDServeError]
) -> None:
    async def scenario(house: House) -> None:
        session = await house.session()
        asked = control_pb2.Borrow(**{"session": session.number, "key": invited(session).key, **fields})
        with pytest.raises(error):
            await asyncio.to_thread(borrow, house.root.nonce, asked)

    within(scenario)
