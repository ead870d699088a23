from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pytest

from tdserve.base.config import PROTOCOL_VERSION, ServerConfig
from tdserve.base.errors import InvalidRequestError, NotSupportedError, ProtocolVersionError, TDServeError
from tdserve.base.ids import make_client_id
from tdserve.base.machine import read_boot_id
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.server.movers.choosing import make_channel_movers
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.register import Sessions
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.world import Loop, Outbox, OutboxConnection, World, outbox


@pytest.fixture
def workers() -> list[DataWorker]:
    """Two that claim to be ready; no process belongs to them."""
    made = [
        DataWorker(
            WorkerArguments(number), WorkerProcesses(), on_session=lambda report: None, on_lost=lambda worker: None
        )
        for number in range(2)
    ]
    for worker in made:
        worker.ready.set()
    return made


@pytest.fixture
def root(world: World) -> Root:
    """The server's root."""
    return world.root


@pytest.fixture
def sessions(workers: list[DataWorker], root: Root, world: World) -> Sessions:
    """A register without sessions."""
    return Sessions(
        ServerConfig(root=str(root.path), inline_bytes=123),
        workers,
        root,
        partial(make_channel_movers, world.mover_context),
    )


def hello(**fields: Any) -> control_pb2.Hello:
    """A valid Hello; arguments replace its fields."""
    good = {"protocol_version": PROTOCOL_VERSION, "client_id": make_client_id(), "transport": "gloo"}
    return control_pb2.Hello(**{**good, **fields})


def test_open_when_hello_is_good_then_welcome(sessions: Sessions, root: Root, run: Loop) -> None:
    session = run(sessions.open(hello(), OutboxConnection(Outbox())))
    (message,) = outbox(session).messages
    welcome = message.welcome
    assert (welcome.session, welcome.server_id, welcome.inline_bytes) == (session.number, root.server_id, 123)
    assert not welcome.HasField("local")
    assert session.number in sessions
    assert list(sessions) == [session]
    assert sessions.find(session.number) is session
    assert session.compute_inline_limit(1) == 123


def test_open_when_clients_wait_for_the_workers_to_start_then_spread_over_them(
    sessions: Sessions, workers: list[DataWorker], run: Loop
) -> None:
    async def scenario() -> list[int]:
        for worker in workers:
            worker.ready.clear()
        opening = [asyncio.ensure_future(sessions.open(hello(), OutboxConnection(Outbox()))) for _ in range(4)]
        await asyncio.sleep(0)  # all wait
        workers[1].ready.set()
        opened = asyncio.as_completed(opening)
        for _ in range(2):  # those that expect this one
            await next(opened)
        workers[0].ready.set()
        return sorted(session.worker.number for session in await asyncio.gather(*opening))

    assert run(scenario()) == [0, 0, 1, 1]


def test_open_when_the_worker_that_a_client_expects_does_not_start_then_gets_another(
    sessions: Sessions, workers: list[DataWorker], run: Loop
) -> None:
    async def scenario() -> list[int]:
        for worker in workers:
            worker.ready.clear()
        opening = [asyncio.ensure_future(sessions.open(hello(), OutboxConnection(Outbox()))) for _ in range(2)]
        await asyncio.sleep(0)  # all wait
        workers[1].ready.set()
        return [session.worker.number for session in await asyncio.gather(*opening)]

    assert run(scenario()) == [1, 1]


class WatchfulOutbox(Outbox):
    """Begins a request of the session as soon as it is told of it."""

    async def write(self, message: control_pb2.ServerMessage) -> None:
        session = self.sessions.find(message.welcome.session)
        assert session is not None
        session.begin(1)

    sessions: Sessions


def test_open_when_the_first_request_is_quicker_than_the_end_of_welcome_then_taken(
    sessions: Sessions, run: Loop
) -> None:
    box = WatchfulOutbox()
    box.sessions = sessions
    session = run(sessions.open(hello(), OutboxConnection(box)))
    assert session.requests == {1}


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_open_when_the_client_is_on_this_machine_then_the_welcome_describes_the_files(
    sessions: Sessions, root: Root, run: Loop, transport: str
) -> None:
    session = run(sessions.open(hello(transport=transport, boot_id=read_boot_id()), OutboxConnection(Outbox())))
    local = outbox(session).messages[0].welcome.local
    nonce = root.nonce_path.stat()
    assert (local.root, local.nonce) == (str(root.path), root.nonce_path.read_text())
    assert (local.device, local.inode) == (nonce.st_dev, nonce.st_ino)
    assert session.invitation is not None
    assert (session.invitation.lock_name, session.invitation.key) == (local.lock_name, local.key)
    assert len(local.key) >= 16
    other = run(sessions.open(hello(transport=transport, boot_id=read_boot_id()), OutboxConnection(Outbox())))
    assert other.invitation is not None
    assert other.invitation.key != local.key
    assert other.invitation.lock_name != local.lock_name


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_open_when_both_ends_have_a_gpu_of_their_own_then_nccl(
    sessions: Sessions, workers: list[DataWorker], run: Loop, transport: str
) -> None:
    workers[0].gpu, workers[1].gpu = "mine", "another"
    session = run(
        sessions.open(hello(transport=transport, gpu="mine", boot_id="elsewhere"), OutboxConnection(Outbox()))
    )
    welcome = outbox(session).messages[0].welcome
    assert (welcome.transport, welcome.gpu, welcome.why_not, welcome.worker) == ("nccl", "another", "", 1)
    assert session.transport == "nccl"


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_open_when_both_ends_share_a_gpu_then_another_transport_with_the_reason(
    sessions: Sessions, workers: list[DataWorker], run: Loop, transport: str
) -> None:
    workers[0].gpu = workers[1].gpu = "mine"
    session = run(
        sessions.open(hello(transport=transport, gpu="mine", boot_id=read_boot_id()), OutboxConnection(Outbox()))
    )
    welcome = outbox(session).messages[0].welcome
    assert (welcome.transport, welcome.gpu) == ("gloo", "")
    assert "both ends use one GPU" in welcome.why_not
    assert welcome.HasField("local") == (transport == "auto")


def test_open_when_no_gpu_is_named_then_nothing_is_said_of_nccl(
    sessions: Sessions, workers: list[DataWorker], run: Loop
) -> None:
    workers[0].gpu = "another"
    session = run(sessions.open(hello(transport="auto"), OutboxConnection(Outbox())))
    welcome = outbox(session).messages[0].welcome
    assert (welcome.transport, welcome.gpu, welcome.why_not) == ("gloo", "", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"transport": "gloo", "boot_id": read_boot_id()},
        {"transport": "shm", "boot_id": "another"},
        {"transport": "shm"},
    ],
)
def test_open_when_the_client_is_elsewhere_or_asks_for_none_then_no_key_for_the_files(
    sessions: Sessions, run: Loop, fields: dict[str, Any]
) -> None:
    session = run(sessions.open(hello(**fields), OutboxConnection(Outbox())))
    assert not outbox(session).messages[0].welcome.HasField("local")
    assert session.invitation is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, ProtocolVersionError),
        ({"transport": "pigeon"}, NotSupportedError),
        ({"client_id": b"short"}, InvalidRequestError),
    ],
)
def test_open_when_hello_is_bad_then_typed_error_and_no_session(
    sessions: Sessions, run: Loop, fields: dict[str, Any], error: type[TDServeError]
) -> None:
    with pytest.raises(error):
        run(sessions.open(hello(**fields), OutboxConnection(Outbox())))
    assert len(sessions) == 0


def test_open_when_the_client_has_one_already_then_that_ends_first(sessions: Sessions, run: Loop) -> None:
    client_id = make_client_id()
    first = run(sessions.open(hello(client_id=client_id), OutboxConnection(Outbox())))
    other = run(sessions.open(hello(), OutboxConnection(Outbox())))
    run(sessions.open(hello(client_id=client_id), OutboxConnection(Outbox())))
    assert first.ended.is_set()
    assert not other.ended.is_set()


def test_open_when_there_are_many_then_spread_over_the_workers(sessions: Sessions, run: Loop) -> None:
    opened = [run(sessions.open(hello(), OutboxConnection(Outbox()))) for _ in range(4)]
    assert sorted(session.worker.number for session in opened) == [0, 0, 1, 1]


def test_close_when_done_then_forgotten_and_its_number_never_comes_again(sessions: Sessions, run: Loop) -> None:
    first = run(sessions.open(hello(), OutboxConnection(Outbox())))
    run(sessions.close(first))
    assert first.ended.is_set()
    assert first.number not in sessions
    assert sessions.find(first.number) is None
    assert run(sessions.open(hello(), OutboxConnection(Outbox()))).number > first.number


def test_worker_lost_when_it_had_sessions_then_only_those_end(
    sessions: Sessions, workers: list[DataWorker], run: Loop
) -> None:
    opened = [run(sessions.open(hello(), OutboxConnection(Outbox()))) for _ in range(2)]
    sessions.on_worker_lost(workers[1])
    assert [session.ended.is_set() for session in opened] == [session.worker is workers[1] for session in opened]


def test_report_when_of_a_loss_then_logged_with_session_channel_and_reason(
    sessions: Sessions, run: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> int:
        session = await sessions.open(hello(), OutboxConnection(Outbox()))
        channel_lost = control_pb2.ChannelLost(channel=0, reason="torn")
        for _ in range(2):  # the second one is no news
            sessions.on_report(worker_pb2.Report(session=session.number, channel_lost=channel_lost))
        session_lost = worker_pb2.SessionLost(reason="gone")
        sessions.on_report(worker_pb2.Report(session=session.number, session_lost=session_lost))
        await session.finish(5.0)
        return session.number

    with caplog.at_level(logging.INFO, logger="tdserve.server"):
        number = run(scenario())
    assert caplog.messages == [
        f"session {number}: channel 0 for content is lost: its data worker reports: torn",
        f"session {number} ends: its data worker reports: gone",
    ]


def test_report_when_of_a_session_then_reaches_its_client(sessions: Sessions, run: Loop) -> None:
    async def scenario() -> list[str]:
        session = await sessions.open(hello(), OutboxConnection(Outbox()))
        entry = control_pb2.Rendezvous(key="k", value=b"v")
        sessions.on_report(worker_pb2.Report(session=session.number, rendezvous=entry))
        sessions.on_report(worker_pb2.Report(session=session.number + 1, rendezvous=entry))
        await session.finish(5.0)
        for number in (0, 0, 7, 1):  # news of other channels than the newest count for nothing; there is no later
            # channel
            channel_lost = control_pb2.ChannelLost(channel=number)
            sessions.on_report(worker_pb2.Report(session=session.number, channel_lost=channel_lost))
        await session.finish(5.0)
        assert (session.channel_number, session.ended.is_set()) == (2, False)
        lost = worker_pb2.Report(session=session.number, session_lost=worker_pb2.SessionLost(reason="gone"))
        sessions.on_report(lost)
        assert session.ended.is_set()
        return [str(message.WhichOneof("body")) for message in outbox(session).messages]

    assert run(scenario()) == ["welcome", "rendezvous", "channel_lost", "channel_lost"]
