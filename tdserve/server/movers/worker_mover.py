"""The mover of a client on the network: the session's data worker sends and receives the content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tdserve.messages.content import decode_paths, make_rows_layout, select_keys
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.execution.turns import drop_references
from tdserve.server.movers.mover_context import MoverContext
from tdserve.server.movers.session_mover import SessionMover
from tdserve.server.movers.value_writes import make_put_values, make_send_entries
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import make_values_path
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import RowsToFill, RowsToSend, StoreToFill, VersionToSend
from tdserve.server.tables.numbers import encode_apart, encode_plan
from tdserve.server.weights.version_files import make_path, make_unfinished_path, release_version
from tdserve.server.weights.version_sender import make_version_ref
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

MAX_BUFFERED_VALUES_BYTES = 16 << 20
"""Values of rows that the worker which stores them receives into memory; more pass through a file, like those that
another worker receives: each session could have as many arriving."""


class WorkerMover(SessionMover):
    """Moves content in messages over a channel. After a failed receive the worker writes no more: its channel is
    closed, or the worker was reaped.

    Args:
        context: What all movers share.
        session: Session whose content it moves.
    """

    uses_channels = True

    def __init__(self, context: MoverContext, session: ClientSession) -> None:
        self.transport = session.channel_transport
        super().__init__(session)
        self._values = context.values
        self._versions = context.versions
        self._writes = context.writes
        self._traffic = context.traffic

    async def _await_worker(self) -> None:
        """Waits for the worker, which need not have started for what a local client reads by itself."""
        session = self._session
        if not session.worker.ready.is_set():
            await session.worker.wait_ready(session.ended)

    @property
    def claim_holder(self) -> ClaimHolder | None:
        """The session's worker."""
        return self._session.worker.claim_holder

    def take_claim(self, store: OpenedStore, grant: Callable[[], control_pb2.Claim | None]) -> control_pb2.Claim | None:
        """Sends the worker the claim, for all of its sessions, once it has handed on all extends that came before.

        One that came later would be stored behind the claimed rows, though its client's next one gets some of these: it
        would end the claim.
        """
        worker = self._session.worker

        def send(prepared: asyncio.Future[worker_pb2.Worked]) -> None:
            if prepared.cancelled() or prepared.exception() is not None:  # the worker is gone
                return
            opening = worker_pb2.OpenClaim(store=store.make_ref(worker.known_specs), claim=grant())
            worker.send(worker_pb2.Order(open_claim=opening))

        preparing = worker_pb2.PrepareClaim(store=store.make_ref(worker.known_specs))
        worker.submit(worker_pb2.Order(prepare_claim=preparing)).add_done_callback(send)
        return None

    async def put_rows(self, request: int, rows: RowsToFill) -> dict[Path, bytes]:
        """Has the session's worker receive the rows. Values that come over the channel are passed to the values worker,
        unless the session's worker is that one and they are few."""
        await self._await_worker()
        worker, content, values = self._session.worker, rows.asked.content, make_put_values(rows)
        is_streamed = bool(content.values_nbytes)
        is_buffered = worker is self._values.worker and content.values_nbytes <= MAX_BUFFERED_VALUES_BYTES
        must_hand_on = is_streamed and not is_buffered
        with self._values.staging.borrow(rows.store, is_needed=must_hand_on) as staging:
            order = self._make_put_order(request, rows)
            order.receive_rows.spool = make_values_path(staging)
            if is_streamed and not staging:
                order.receive_rows.put_values.CopyFrom(values)
            moving = worker.submit(order)
            if staging:
                await moving
                values.spool, values.spool_nbytes = make_values_path(staging), content.values_nbytes
            if staging or (values.values and not is_streamed):
                await self._values.store_beside(moving, rows.store, values)
            columns = (await moving).columns
        self._traffic.count_received(self.transport, content)
        return rows.name_columns(columns)

    def _make_put_order(self, request: int, rows: RowsToFill) -> worker_pb2.Order:
        content = rows.asked.content
        order = self._session.make_order(request, is_accepted=bool(content.message_nbytes))
        body = order.receive_rows
        body.store.CopyFrom(rows.store.make_ref(self._session.worker.known_specs))
        body.rows = rows.reservation.encoded
        body.keys.extend(rows.asked.keys)
        body.columns.extend(content_pb2.Path(parts=path) for path in rows.columns)
        body.content.fingerprint = content.fingerprint
        body.content.message_nbytes.extend(content.message_nbytes)
        body.content.values_nbytes = content.values_nbytes
        if content.HasField("inline"):
            body.content.inline = content.inline
        return order

    async def get_rows(self, request: int, rows: RowsToSend) -> control_pb2.Done | None:
        """Sends the rows inline in the answer if that is allowed and they are small, else over the channel."""
        session, store, plan, accepted = self._session, rows.store, rows.plan, rows.accepted
        rest = [await encode_apart(plan, _make_order)]
        try:
            order = session.make_order(request)
            body = order.send_rows
            body.store.CopyFrom(store.make_ref(session.worker.known_specs))
            if not rest[0]:
                _name_rows(body, plan)
            body.keys.extend(rows.keys)
            body.sends_values = session.hello.takes_values
            if accepted is None:
                order.is_accepted = True
                session.accepted_requests.add(request)
                worked = await session.worker.submit(order, rest=rest[0])
                self._traffic.count_sent(self.transport, worked.nbytes_moved)
                return None
            spec = select_keys(store.spec, decode_paths(rows.keys), store=store.name)
            layout = make_rows_layout(spec, len(plan.rows), tuple(plan.columns))
            body.inline = sum(layout.message_nbytes) <= session.compute_inline_limit(request)
            order.is_accepted = not body.inline and not spec.values
            return await self._traffic.read(
                session, request, order, accepted, announces=order.is_accepted, rest=rest[0]
            )
        finally:
            drop_references(rest, num_rows=len(plan.rows))

    async def fill(self, request: int, store: StoreToFill, content: control_pb2.Content) -> None:
        """Has the session's worker receive the tensors straight into the store's files."""
        await self._await_worker()
        order = self._session.make_order(request, is_accepted=bool(content.message_nbytes))
        body = order.receive_selection
        body.store.CopyFrom(store.ref(self._session.worker.known_specs))
        body.content.CopyFrom(content)
        body.content.ClearField("values")
        body.spool = store.spool if content.values_nbytes else ""
        await self._session.worker.submit(order)
        self._traffic.count_received(self.transport, content)

    async def overwrite(self, request: int, store: OpenedStore, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Replaces the rows once all content has arrived."""
        await self._await_worker()
        return await self._writes.write_staged(self._session, request, store, asked)

    async def get_selection(
        self, request: int, store: OpenedStore, asked: control_pb2.ReadRequest, accepted: control_pb2.Accepted
    ) -> control_pb2.Done | None:
        """Has the session's worker determine the size of the selection and send it."""
        session = self._session
        order = session.make_order(request)
        body = order.send_selection
        body.store.CopyFrom(store.make_ref(session.worker.known_specs))
        body.selection.CopyFrom(asked.selection)
        body.keys.extend(asked.keys)
        body.inline_bytes = session.compute_inline_limit(request)
        body.sends_values = session.hello.takes_values
        if asked.message_nbytes:  # the client waits for the content and no answer
            body.expected_nbytes.extend(asked.message_nbytes)
            self._traffic.count_sent(self.transport, (await session.worker.submit(order)).nbytes_moved)
            return None
        return await self._traffic.read(session, request, order, accepted, announces=False)

    async def get_entries(
        self, request: int, store: OpenedStore, asked: control_pb2.GetRequest
    ) -> control_pb2.Done | None:
        """Has the session's worker send the entries."""
        await self._await_worker()
        session = self._session
        order = session.make_order(request)
        order.send_entries.CopyFrom(make_send_entries(store, session.worker, asked))
        order.send_entries.sends_values = session.hello.takes_values
        return await self._traffic.read(session, request, order, control_pb2.Accepted(), announces=False)

    async def put_version(
        self, request: int, store: OpenedStore, publishing: UnfinishedVersion, spec: Spec, content: control_pb2.Content
    ) -> None:
        """Has the session's worker write the file."""
        await self._await_worker()
        order = self._session.make_order(request, is_accepted=bool(content.message_nbytes))
        body = order.receive_version
        body.version.CopyFrom(make_version_ref(make_unfinished_path(store, publishing), spec, self._session.worker))
        if publishing.recycles is not None:
            body.version.recycles = str(make_path(store, publishing.recycles))
        body.content.CopyFrom(content)
        await self._session.worker.submit(order)
        self._traffic.count_received(self.transport, content)

    async def get_version(self, request: int, version: VersionToSend) -> control_pb2.Done | None:
        """Sends the version, which keeps its file until that is done."""
        number = version.record.version
        version.store.get_versions().acquire(number)
        try:
            return await self._versions.send(self._session, request, version)
        finally:
            release_version(version.store, number)


def _make_order(plan: RowsPlan) -> worker_pb2.Order:
    order = worker_pb2.Order()
    _name_rows(order.send_rows, plan)
    return order


def _name_rows(body: worker_pb2.SendRows, plan: RowsPlan) -> None:
    body.rows, body.generations = encode_plan(plan)
    for name, column in plan.columns.items():
        body.columns.add(name=name, content=column.tobytes())
