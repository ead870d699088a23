"""The mover of a local client that cannot read or write all files of the server itself."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.rules.channel_transports import LOCAL_TRANSPORT
from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.movers.mover_context import MoverContext
from tdserve.server.movers.permit_mover import PermitMover
from tdserve.server.movers.session_mover import SessionMover
from tdserve.server.movers.worker_mover import WorkerMover
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.mover import Mover, RowsToFill, RowsToSend, StoreToFill, VersionToSend
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import control_pb2, worker_pb2


def make_local_mover(context: MoverContext, session: ClientSession, client: LocalClient) -> Mover:
    """Makes the mover of a session whose client was attached."""
    permits = PermitMover(context, session, client)
    if client.lock_name and not client.lacks_values:
        return permits
    channel = WorkerMover(context, session)
    return SplitMover(session, permits, channel, writes=permits if client.lock_name else channel)


class SplitMover(SessionMover):
    """Moves by permits what the client can read or write itself, and the rest over the session's channel.

    A method without a docstring does what the same method of the mover does that it calls.

    Args:
        session: Session whose content it moves.
        permits: Moves what the client reads.
        channel: Moves entries of keyed stores, which the client cannot open.
        writes: The one of the two that moves what the client writes.
    """

    transport = LOCAL_TRANSPORT
    uses_channels = True

    def __init__(
        self, session: ClientSession, permits: PermitMover, channel: WorkerMover, *, writes: PermitMover | WorkerMover
    ) -> None:
        super().__init__(session)
        self.lock_name = writes.lock_name
        self._reads, self._writes, self._entries = permits, writes, channel

    @property
    def claim_holder(self) -> ClaimHolder | None:
        return self._writes.claim_holder

    def take_claim(self, store: OpenedStore, grant: Callable[[], control_pb2.Claim | None]) -> control_pb2.Claim | None:
        return self._writes.take_claim(store, grant)

    async def put_rows(self, request: int, rows: RowsToFill) -> dict[Path, bytes]:
        await self._await_worker()
        return await self._writes.put_rows(request, rows)

    def forget_rows(self, rows: RowsToFill, txn: Transaction) -> None:
        self._writes.forget_rows(rows, txn)

    def give_up_rows(self, request: int, rows: RowsToFill) -> None:
        self._writes.give_up_rows(request, rows)

    async def fill(self, request: int, store: StoreToFill, content: control_pb2.Content) -> None:
        await self._await_worker()
        await self._writes.fill(request, store, content)

    def locate_values(self, content: control_pb2.Content, order: worker_pb2.PutValues, spool: str) -> None:
        self._writes.locate_values(content, order, spool)

    async def overwrite(self, request: int, store: OpenedStore, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        await self._await_worker()
        return await self._writes.overwrite(request, store, asked)

    async def put_version(
        self, request: int, store: OpenedStore, publishing: UnfinishedVersion, spec: Spec, content: control_pb2.Content
    ) -> None:
        await self._await_worker()
        await self._writes.put_version(request, store, publishing, spec, content)

    async def get_rows(self, request: int, rows: RowsToSend) -> control_pb2.Done | None:
        return await self._reads.get_rows(request, rows)

    async def get_selection(
        self, request: int, store: OpenedStore, asked: control_pb2.ReadRequest, accepted: control_pb2.Accepted
    ) -> control_pb2.Done | None:
        return await self._reads.get_selection(request, store, asked, accepted)

    async def get_entries(
        self, request: int, store: OpenedStore, asked: control_pb2.GetRequest
    ) -> control_pb2.Done | None:
        await self._await_worker()
        return await self._entries.get_entries(request, store, asked)

    async def get_version(self, request: int, version: VersionToSend) -> control_pb2.Done | None:
        return await self._reads.get_version(request, version)

    def may_still_write(self, request: int) -> bool:
        return self._reads.may_still_write(request) or self._writes.may_still_write(request)

    def move_to_tasks(self) -> None:
        self._reads.move_to_tasks()

    async def _await_worker(self) -> None:
        """Waits for the worker, which need not have started for what the client reads."""
        session = self._session
        await session.worker.wait_ready(session.ended)
