"""The parts of a control process on a root of their own, with one real data worker. Clients are outboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch

from tdserve.base.config import ServerConfig
from tdserve.base.errors import TDServeError
from tdserve.base.ids import make_client_id
from tdserve.client.content.leaves import copy_contents
from tdserve.client.content.received import make_views
from tdserve.client.content.value_blocks import encode_values
from tdserve.control.servicer import SessionConnection
from tdserve.control.status import decode_failure
from tdserve.messages.content import write_layout
from tdserve.messages.layout import Layout
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.settings import Settings
from tdserve.server.dispatch.requests import Requests
from tdserve.server.dispatch.services import assemble
from tdserve.server.movers.choosing import make_channel_movers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.transport.sources_sinks import FlatBuffer, JoinedSource
from tdserve.transport.stream import pack, unpack
from tdserve.v1 import control_pb2

TIMEOUT_S = 90.0
"""A data worker imports torch: three seconds, ten times that on a busy machine."""
INLINE_BYTES = 1 << 20
OPEN_SESSIONS = range(1, 10)

_Result = TypeVar("_Result")


class Loop:
    """One event loop for all tests of this folder: the data worker's socket lives on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs a coroutine to its end; fails if it does not end in time."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))


class Outbox:
    """Stands for the stream of gRPC; keeps its messages in memory."""

    def __init__(self) -> None:
        self.messages: list[control_pb2.ServerMessage] = []
        self._written = asyncio.Event()

    async def write(self, message: control_pb2.ServerMessage) -> None:
        self.messages.append(message)
        self._written.set()

    async def next(self) -> None:
        """Waits for the next message that was not taken yet."""
        while not self.messages:
            self._written.clear()
            await self._written.wait()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def done(self) -> control_pb2.Done:
        """Returns the only answer, which is a Done."""
        (message,) = self.messages
        assert message.HasField("done"), message
        self.messages.clear()
        return message.done

    def error(self) -> TDServeError:
        """Returns the only answer, which is a Failure."""
        (message,) = self.messages
        assert message.HasField("failure"), message
        self.messages.clear()
        return decode_failure(message.failure)


class OutboxConnection(SessionConnection):
    """The connection to a client whose answers stay in an outbox."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(outbox)
        self.outbox = outbox


class World:
    """Everything but the gRPC server."""

    def __init__(self, path: FilePath, worker: DataWorker) -> None:
        self.worker = worker
        self.path = path
        self.open()

    def open(self) -> None:
        """Opens the parts as after a start."""
        self.root = Root.acquire(self.path)
        self.db = CatalogDB(self.root.catalog_folder)
        self.process_watch = ProcessWatch(self.root.sessions_folder)
        config = ServerConfig(root=str(self.path), memory_limit_bytes=1 << 30, sync_interval_s=0.0)
        services = assemble(config, self.root, self.db, self.process_watch, [self.worker], OPEN_SESSIONS)
        self.services, self.requests, self.traffic = services, Requests(services), services.traffic
        self.stores, self.answers, self.mover_context = services.stores, services.answers, services.mover_context
        self.reads, self.writes, self.alterations = services.reads, services.writes, services.alterations
        self.adoption, self.publishing, self.relays = services.adoption, services.publishing, services.relays
        self.extends, self.row_reads = services.extends, services.row_reads
        self.samples, self.changes = services.samples, services.changes
        self.creation = services.creation
        self.stores.restore()

    def close(self) -> None:
        """Closes the parts as at a stop; the worker, which the next world has too, loses its claims."""
        if self.worker.claim_holder is not None:
            self.services.claiming.on_worker_lost(self.worker.claim_holder)
        self.db.close()
        self.root.release()

    def reopen(self) -> None:
        """Closes and opens the parts as at a restart."""
        self.close()
        self.open()

    def session(self, number: int = 1) -> ClientSession:
        """Opens a session for a client of its own; ``outbox`` returns its messages."""
        return self.session_of(control_pb2.Hello(client_id=make_client_id(), transport="gloo"), number)

    def session_of(self, hello: control_pb2.Hello, number: int) -> ClientSession:
        """Opens a session for the client that sends this hello."""
        return ClientSession(
            number,
            hello,
            OutboxConnection(Outbox()),
            make_movers=partial(make_channel_movers, self.mover_context),
            worker=self.worker,
            interface="127.0.0.1",
            inline_bytes=INLINE_BYTES,
        )

    async def create(self, name: str, td: Any, **fields: Any) -> OpenedStore:
        """Creates a visible tensordict store of this structure, filled with zeros."""
        await self.creation.create(new_store(name, td, **fields))
        return self.stores.get(name)

    async def begin(self, name: str, td: Any, session: int) -> OpenedStore:
        """Creates a tensordict store that this session fills for the first time."""
        return await self.creation.begin_filling(session, *self.creation.read(new_store(name, td)))

    async def create_replay(self, name: str, like: Any, capacity: int, *, min_size: int = 1) -> OpenedStore:
        """Creates a replay table for rows like this one."""
        settings = Settings(limiter=MinSize(min_size)).to_json()
        kind = control_pb2.STORE_KIND_REPLAY
        return await self.create(name, like, kind=kind, capacity=capacity, settings=settings)


async def outside(call: Callable[[], Any]) -> Any:
    """Calls a function as the event loop does, outside any task, and lets the loop take one more turn afterwards."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def callback() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            done.set_exception(error)

    loop.call_soon(callback)
    return await done


async def turns_during(work: Coroutine[Any, Any, Any]) -> int:
    """Returns how often another callback of the event loop runs while a coroutine is under way; the coroutine must
    succeed."""
    task, num_turns = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


def outbox(session: ClientSession) -> Outbox:
    """Returns the outbox with the session's answers."""
    assert isinstance(session.connection, OutboxConnection)
    return session.connection.outbox


def new_store(name: str, td: Any, **fields: Any) -> control_pb2.CreateStoreRequest:
    """Asks for a store of this structure, by default of the kind tensordict."""
    fields = {"kind": control_pb2.STORE_KIND_TENSORDICT, **fields}
    return control_pb2.CreateStoreRequest(name=name, spec=codec.encode(capture(td).spec), **fields)


def content_of(td: Any, fingerprint: bytes | None = None, *, is_packed: bool = False) -> control_pb2.Content:
    """Encodes a tensordict as inline content. The fingerprint is the store's, by default that of ``td``."""
    captured = capture(td)
    layout, contents = write_layout(captured.spec, is_packed=is_packed), copy_contents(captured)
    return control_pb2.Content(
        fingerprint=captured.spec.fingerprint if fingerprint is None else fingerprint,
        inline=pack(layout.messages, JoinedSource([[contents[slot.path]] for slot in layout.slots])),
        nbytes=sum(layout.message_nbytes),
        values=encode_values(captured.spec, captured.values, store=""),
    )


def columns_of(layout: Layout, inline: bytes) -> dict[str, torch.Tensor]:
    """Decodes inline content into its columns, by the last key of each."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(inline, layout.messages, FlatBuffer(buffer))
    return {slot.path[-1]: column for slot, column in zip(layout.slots, make_views(layout, buffer), strict=True)}
