from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.config import PROTOCOL_VERSION, ServerConfig
from tdserve.base.errors import (
    ConnectError,
    ProtocolVersionError,
    RemoteProtocolError,
    StoreNotFoundError,
    TransferAbortedError,
)
from tdserve.control.servicer import SessionConnection
from tdserve.control.status import decode_failure
from tdserve.server import control_process
from tdserve.server.control_process import ControlProcess
from tdserve.server.processes.workers import DataWorker
from tdserve.store.roots.root import Root
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.world import Loop, Outbox, outside

SPEC = codec.encode(capture(TensorDict({"a": torch.zeros(4, 2)}, [4])).spec)


class ReadyWorker(DataWorker):
    """A data worker that counts as ready and has no process, since requests without content do not need one."""

    def __init__(self, *arguments: Any, on_session: Callable[[worker_pb2.Report], None], **options: Any) -> None:
        super().__init__(*arguments, on_session=on_session, **options)
        self.report = on_session

    def start(self) -> None:
        self.ready.set()


@contextmanager
def restored(folder: Path, run: Loop, **parts: Any) -> Iterator[ControlProcess]:
    """A control process that was not started."""
    config = ServerConfig(root=str(folder / "root"), grace_s=0.1)
    root = Root.acquire(config.root)

    async def make() -> ControlProcess:
        return ControlProcess(config, root, **parts)

    made = run(make())
    made.restore()
    yield made
    run(made.stop())
    root.release()


@pytest.fixture
def process(tmp_path: Path, run: Loop) -> Iterator[ControlProcess]:
    """A control process that was not started."""
    with restored(tmp_path, run) as made:
        yield made


@pytest.fixture
def serving(tmp_path: Path, run: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """A session, not begun yet, of a control process that was started."""
    made: list[ReadyWorker] = []

    def make_worker(*arguments: Any, **options: Any) -> ReadyWorker:
        made.append(ReadyWorker(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(control_process, "KEEP_CLIENTS_S", 0.0)
    with restored(tmp_path, run, make_worker=make_worker) as process:
        run(process.start())
        yield Serving(process, made[0], tmp_path / "root")


def creating(request: int) -> control_pb2.ClientMessage:
    """Returns a request for a tensordict store "x"."""
    asked = control_pb2.CreateStoreRequest(name="x", kind=control_pb2.STORE_KIND_TENSORDICT, spec=SPEC)
    return control_pb2.ClientMessage(request=request, create_store=asked)


def deleting(request: int) -> control_pb2.ClientMessage:
    """Returns a request that deletes it."""
    asked = control_pb2.DeleteStoreRequest(name="x")
    return control_pb2.ClientMessage(request=request, delete_store=asked)


async def stream_messages(*messages: control_pb2.ClientMessage) -> AsyncIterator[control_pb2.ClientMessage]:
    """Returns a stream of a client that sends this message and closes."""
    for message in messages:
        yield message


def test_stores_when_created_then_described_listed_and_deleted(serving: Serving, run: Loop) -> None:
    process = serving.process

    async def scenario() -> None:
        await serving.start()
        assert (await serving.ask(creating(1))).created_store.created
        assert (await process.describe_store(control_pb2.DescribeStoreRequest(name="x"))).spec == SPEC
        assert list((await process.list_stores(control_pb2.ListStoresRequest())).names) == ["x"]
        assert list((await process.list_keys(control_pb2.ListKeysRequest(name="x"))).keys) == ["a"]
        assert (await process.get_stats(control_pb2.GetStatsRequest())).num_stores == 1
        await serving.ask(deleting(2))
        with pytest.raises(StoreNotFoundError):
            await process.describe_store(control_pb2.DescribeStoreRequest(name="x"))
        await serving.end()

    run(scenario())


def test_stats_when_asked_then_figures_of_the_whole(process: ControlProcess, run: Loop) -> None:
    stats = run(process.get_stats(control_pb2.GetStatsRequest()))
    assert (stats.num_stores, stats.num_sessions) == (0, 0)
    assert [worker.is_ready for worker in stats.workers] == [False]
    assert Path(stats.root).is_dir()
    assert stats.root_free_bytes > 0


@pytest.mark.parametrize("messages", [[], [control_pb2.ClientMessage(request=1, read=control_pb2.ReadRequest())]])
def test_session_when_it_does_not_begin_with_hello_then_refused(
    process: ControlProcess, run: Loop, messages: list[control_pb2.ClientMessage]
) -> None:
    with pytest.raises(RemoteProtocolError, match="Hello"):
        run(process.serve_session(SessionConnection(Outbox()), stream_messages(*messages)))


def test_drain_when_begun_then_nothing_new_is_accepted(serving: Serving, run: Loop) -> None:
    process = serving.process
    run(process.drain())
    outbox = Outbox()
    hello = control_pb2.Hello(protocol_version=PROTOCOL_VERSION, client_id=bytes(16), transport="gloo")
    run(process.serve_session(SessionConnection(outbox), stream_messages(control_pb2.ClientMessage(hello=hello))))
    assert isinstance(outbox.error(), ConnectError)


class Serving:
    """A session whose client has sent Hello and stays; ``mail`` delivers what its worker forwards."""

    def __init__(self, process: ControlProcess, worker: ReadyWorker, root: Path) -> None:
        self.process = process
        self.worker = worker
        self.root = root
        self._sent: asyncio.Queue[control_pb2.ClientMessage | None] = asyncio.Queue()
        self.outbox = Outbox()
        self.number = 0
        self.task: asyncio.Task[None]

    async def start(self) -> None:
        """Starts the session and waits until it is open."""
        self.task = asyncio.create_task(self.process.serve_session(SessionConnection(self.outbox), self._stream()))
        await self.outbox.next()
        self.number = self.outbox.messages.pop().welcome.session

    async def mail(self, content: bytes, *, session: int = 0) -> None:
        """Delivers a message as the worker reports it, and lets the event loop take one turn."""
        report = worker_pb2.Report(session=session or self.number, mail=content)
        await outside(lambda: self.worker.report(report))

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message over the stream."""
        self._sent.put_nowait(message)

    async def ask(self, message: control_pb2.ClientMessage) -> control_pb2.Done:
        """Sends a request over the stream; returns its answer, which is a Done."""
        self.send(message)
        await self.outbox.next()
        return self.outbox.done()

    async def end(self) -> None:
        """Ends the client's stream."""
        self._sent.put_nowait(None)
        await self.task

    async def _stream(self) -> AsyncIterator[control_pb2.ClientMessage]:
        hello = control_pb2.Hello(protocol_version=PROTOCOL_VERSION, client_id=bytes(16), transport="gloo")
        yield control_pb2.ClientMessage(hello=hello)
        while (message := await self._sent.get()) is not None:
            yield message


def reading(request: int, **fields: Any) -> bytes:
    """Returns a request for a store that does not exist, as a forwarded message."""
    read = control_pb2.ReadRequest(store="no such store", **fields)
    return control_pb2.ClientMessage(request=request, read=read).SerializeToString()


def test_session_when_its_client_stays_away_then_its_answers_are_forgotten_and_not_before(
    serving: Serving, run: Loop
) -> None:
    async def create(serving: Serving) -> str:
        return str((await serving.ask(creating(1))).created_store.description.uid)

    async def scenario() -> None:
        await serving.start()
        first = await create(serving)
        await serving.ask(deleting(2))
        assert await create(serving) == first  # the answer that is kept
        await serving.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        later = Serving(serving.process, serving.worker, serving.root)
        await later.start()
        assert await create(later) != first
        await later.end()

    run(scenario())


def test_session_when_its_client_stays_away_then_what_it_was_bringing_is_removed(serving: Serving, run: Loop) -> None:
    sizes = control_pb2.FileSizes(paths=[b"rows/a"], nbytes=[10])
    moving = control_pb2.MoveRequest(store="x", move="0" * 32, receive=sizes)

    async def scenario() -> None:
        await serving.start()
        await serving.ask(control_pb2.ClientMessage(request=1, move=moving))
        (arrived,) = serving.root.glob("arriving/*/rows/a")
        assert arrived.stat().st_size == 10
        await serving.end()
        while list(serving.root.glob("arriving/*")):  # noqa: ASYNC110 (the loop's time limit ends it)
            await asyncio.sleep(0)

    run(scenario())


def test_mail_when_a_request_then_answered_at_once(serving: Serving, run: Loop) -> None:
    async def scenario() -> None:
        await serving.start()
        await serving.mail(reading(1, fingerprint=b"known"))
        assert isinstance(serving.outbox.error(), StoreNotFoundError)
        await serving.end()

    run(scenario())


def test_mail_when_a_cancellation_then_that_request_is_given_up(serving: Serving, run: Loop) -> None:
    async def scenario() -> None:
        await serving.start()
        for request in (1, 2):
            await serving.mail(reading(request, timeout_s=20.0))
        cancel = control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=2))
        await serving.mail(cancel.SerializeToString())
        await serving.outbox.next()
        error = serving.outbox.error()
        assert isinstance(error, TransferAbortedError)
        assert error.transfer == 2
        await serving.end()

    run(scenario())


def test_mail_when_it_comes_between_long_lists_and_their_request_then_both_are_served(
    serving: Serving, run: Loop
) -> None:
    selection = control_pb2.ReadRequest(selection={"items": [{"positions": {"nbytes_ahead": 16}}]}).selection
    read = control_pb2.ClientMessage.FromString(reading(2, fingerprint=b"known", selection=selection))

    async def scenario() -> None:
        await serving.start()
        part = control_pb2.MessagePart(content=bytes(16), is_ahead=True)
        serving.send(control_pb2.ClientMessage(request=2, part=part))
        while not list(serving.root.glob("requests/*")):  # noqa: ASYNC110 (the loop's time limit ends it)
            await asyncio.sleep(0)
        await serving.mail(reading(3, fingerprint=b"known"))
        assert isinstance(serving.outbox.error(), StoreNotFoundError)
        serving.send(read)
        await serving.outbox.next()
        assert isinstance(serving.outbox.error(), StoreNotFoundError)
        await serving.end()

    run(scenario())


def test_mail_when_garbage_then_the_session_ends(serving: Serving, run: Loop) -> None:
    async def scenario() -> None:
        await serving.start()
        await serving.mail(b"\xff" * 20)
        await serving.task
        await serving.mail(reading(1, fingerprint=b"known"))  # it may have come before the worker knew
        assert serving.outbox.messages == []

    run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        {"client_report": {}},
        {"relay_report": {"holds": 1}},
        {"group_notice": {"name": "no such group"}},
        {"channel_lost": {"channel": 0}},
        {"part": {"content": b"x"}},
    ],
)
def test_mail_when_it_is_no_request_then_nothing_of_it_is_kept(
    serving: Serving, run: Loop, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        await serving.start()
        await serving.mail(control_pb2.ClientMessage(request=1, **body).SerializeToString())
        # Its number is forgotten: the answer to another message with it comes the way of that one.
        assert (await asyncio.wait_for(serving.ask(creating(1)), 20.0)).created_store.created
        await serving.end()

    run(scenario())


def test_mail_when_of_no_session_then_nothing(serving: Serving, run: Loop) -> None:
    async def scenario() -> None:
        await serving.start()
        await serving.mail(reading(1, fingerprint=b"known"), session=serving.number + 1)
        assert serving.outbox.messages == []
        await serving.end()

    run(scenario())


def test_mail_when_the_server_drains_then_refused(serving: Serving, run: Loop) -> None:
    async def scenario() -> None:
        await serving.start()
        await serving.mail(reading(1, timeout_s=20.0))
        draining = asyncio.create_task(serving.process.drain())  # which waits for it
        refused = asyncio.create_task(serving.outbox.next())
        await serving.mail(reading(2, fingerprint=b"known"))
        await refused
        errors = {message.request: decode_failure(message.failure) for message in serving.outbox.messages}
        assert isinstance(errors[2], ConnectError)
        await draining
        await serving.end()

    run(scenario())


def test_session_when_hello_is_of_another_version_then_one_failure(serving: Serving, run: Loop) -> None:
    outbox = Outbox()
    hello = control_pb2.Hello(protocol_version=PROTOCOL_VERSION + 1, client_id=bytes(16), transport="gloo")
    run(
        serving.process.serve_session(
            SessionConnection(outbox), stream_messages(control_pb2.ClientMessage(hello=hello))
        )
    )
    error = outbox.error()
    assert isinstance(error, ProtocolVersionError)
    assert (error.expected, error.actual) == (PROTOCOL_VERSION + 1, PROTOCOL_VERSION)


def test_session_when_nothing_is_said_then_it_ends(process: ControlProcess, run: Loop, monkeypatch: Any) -> None:
    monkeypatch.setattr(control_process, "HELLO_TIMEOUT_S", 0.01)

    async def silence() -> AsyncIterator[control_pb2.ClientMessage]:
        await asyncio.Event().wait()
        yield control_pb2.ClientMessage()

    with pytest.raises(RemoteProtocolError, match="Hello"):
        run(process.serve_session(SessionConnection(Outbox()), silence()))
