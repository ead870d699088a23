"""The mover of a local client, which copies the content itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.messages.content import decode_paths, select_keys
from tdserve.messages.row_numbers import PIECE_ROWS, encode_rows, spread
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.rules.channel_transports import LOCAL_TRANSPORT
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.execution.turns import drop_references
from tdserve.server.movers.mover_context import MoverContext
from tdserve.server.movers.session_mover import SessionMover
from tdserve.server.movers.value_writes import make_put_values, make_send_entries
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.processes.claim_writers import LocalWriter
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.mover import RowsToFill, RowsToSend, StoreToFill, VersionToSend
from tdserve.server.tables.numbers import encode_apart, encode_plan
from tdserve.server.weights.version_files import make_path, make_unfinished_path
from tdserve.server.weights.version_sender import make_accepted
from tdserve.store.database.catalog_db import Transaction
from tdserve.store.rows.generations import sum_generations
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.values.value_columns import join_blocks

_PART_ELEMENTS = PIECE_ROWS // 2
"""Elements whose values are read at a time: the report of short texts takes about a millisecond."""


class PermitMover(SessionMover):
    """Moves content by permits. What the client may write is recorded before the client learns of it, and given to no
    other writer until the client is done or proved gone.

    Args:
        context: What all movers share.
        session: Session whose content it moves.
        client: Local client of the session. One that holds no lock may only read.
    """

    transport = LOCAL_TRANSPORT

    def __init__(self, context: MoverContext, session: ClientSession, client: LocalClient) -> None:
        self.lock_name = client.lock_name
        self._claim_holder = ClaimHolder(LocalWriter(client.lock_name, session.client_id), session.ended.set)
        super().__init__(session)
        self._client = client
        self._stores = context.stores
        self._values = context.values
        self._writes = context.writes
        self._traffic = context.traffic
        self._held = context.held

    @property
    def claim_holder(self) -> ClaimHolder | None:
        """The client."""
        return self._claim_holder

    def take_claim(self, store: OpenedStore, grant: Callable[[], control_pb2.Claim | None]) -> control_pb2.Claim | None:
        """Returns the claim at once: the client extends no table again before it has its answer."""
        return grant()

    async def put_rows(self, request: int, rows: RowsToFill) -> dict[Path, bytes]:
        """Has the client fill the rows while a worker stores their values, if there are any."""
        client, store, values = self._client, rows.store, make_put_values(rows)
        client.add_spool(rows.asked.content, values)
        written = control_pb2.Written()
        if store.spec.tensors:
            written = await self._let_fill(request, rows, values)
        elif _is_any(values):  # without tensors there is nothing for the client to write
            await self._values.store(store, values)
        self._traffic.count_received(self.transport, rows.asked.content)
        return rows.name_columns(written.columns)

    async def _let_fill(self, request: int, rows: RowsToFill, values: worker_pb2.PutValues) -> control_pb2.Written:
        self._record(rows).save(self._stores.db)
        record = rows.store.record
        accepted = control_pb2.Accepted(uid=record.uid, structure=record.structure, rows=rows.reservation.encoded)
        accepted.columns.extend(content_pb2.Path(parts=path) for path in rows.columns)
        if not _is_any(values):
            return await self._client.let_fill(request, accepted)
        writing = self._client.let_write(request, accepted)
        await self._values.store_beside(writing, rows.store, values)
        return await writing

    def _record(self, rows: RowsToFill) -> ReservedRows:
        return ReservedRows(rows.store.record.uid, self.lock_name, rows.reservation.num, rows.reservation.encoded)

    def forget_rows(self, rows: RowsToFill, txn: Transaction) -> None:
        """Deletes the record of these rows, so that they wait for no client after a restart."""
        txn.delete("pending", self._record(rows).key)

    def give_up_rows(self, request: int, rows: RowsToFill) -> None:
        """Frees the rows, or holds them back while the client may still write: a stopped process may continue."""
        if self.may_still_write(request):
            self._stores.unfinished_writes.hold_back(rows.store, rows.reservation, self._record(rows))
        else:
            super().give_up_rows(request, rows)
            self._stores.db.delete("pending", self._record(rows).key)

    async def get_rows(self, request: int, rows: RowsToSend) -> control_pb2.Done | None:
        """Sends the client the rows to copy.

        Raises:
            RemoteProtocolError: The client waits for messages instead.
        """
        store, plan, accepted = rows.store, rows.plan, rows.accepted
        if accepted is None:
            raise RemoteProtocolError(expected="a sample that the client copies", received="one that comes in messages")
        is_kept = not len(plan.spent)
        values = b""
        if self._client.lacks_values and store.spec.values:
            paths = [path for path, _ in select_keys(store.spec, decode_paths(rows.keys), store=store.name).values]
            values = await self._read_values(store, paths, await _spread_in_pieces(store, plan.rows))
        rest = [await encode_apart(plan, partial(_make_answer if is_kept else _make_permit, values=values))]
        accepted.uid, accepted.structure = store.record.uid, store.record.structure
        if not rest[0]:
            _add_rows(accepted, plan, values)
        self._traffic.count_sent(self.transport, 0)
        try:
            if not is_kept:
                accepted.wants_written = True  # no writer gets rows that leave the table before they are copied
                await self._client.let_write(request, accepted, rest[0])
                return control_pb2.Done()
            done = control_pb2.Done(accepted=accepted)
            if not rest[0]:
                return done
            await self._client.send(control_pb2.ServerMessage(request=request, done=done), rest[0])
            return None
        finally:
            drop_references(rest, num_rows=len(plan.rows))

    async def fill(self, request: int, store: StoreToFill, content: control_pb2.Content) -> None:
        """Has the client write the tensors into the store's files."""
        await self._client.let_write(request, control_pb2.Accepted(uid=store.uid, path=store.path))
        self._traffic.count_received(self.transport, content)

    def locate_values(self, content: control_pb2.Content, order: worker_pb2.PutValues, spool: str) -> None:
        """Adds the client's own file as the place of the values."""
        self._client.add_spool(content, order)

    async def overwrite(self, request: int, store: OpenedStore, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Has the client copy the content over the rows. If it dies on the way, they are lost."""
        return await self._writes.write_in_place(self._session, self._client, request, store, asked)

    async def get_selection(
        self, request: int, store: OpenedStore, asked: control_pb2.ReadRequest, accepted: control_pb2.Accepted
    ) -> control_pb2.Done | None:
        """Sends the client the store and the structure to read."""
        accepted.uid, accepted.structure = store.record.uid, store.record.structure
        if self._client.lacks_values and store.spec.values:
            paths = [path for path, _ in select_keys(store.spec, decode_paths(asked.keys), store=store.name).values]
            accepted.generation_sum, elements = await _look_up(store, from_message(asked.selection))
            accepted.values = await self._read_values(store, paths, elements)
        self._traffic.count_sent(self.transport, 0)
        return control_pb2.Done(accepted=accepted)

    async def _read_values(self, store: OpenedStore, paths: Sequence[Path], elements: NDArray[np.int64]) -> bytes:
        with self._held.count_growing(self._session, "values of a read") as count:
            return await read_values(self._session.worker, store, paths, elements, count=count)

    async def get_entries(
        self, request: int, store: OpenedStore, asked: control_pb2.GetRequest
    ) -> control_pb2.Done | None:
        """Lets the client read entries itself, once there are all."""
        accepted, worker = control_pb2.Accepted(uid=store.record.uid), self._session.worker
        if asked.timeout_s:
            order = worker_pb2.Order(send_entries=make_send_entries(store, worker, asked))
            order.send_entries.only_checks = True
            await worker.submit(order)
        self._traffic.count_sent(self.transport, 0)
        return control_pb2.Done(accepted=accepted)

    async def put_version(
        self, request: int, store: OpenedStore, publishing: UnfinishedVersion, spec: Spec, content: control_pb2.Content
    ) -> None:
        """Has the client write the file. If that fails, the file is unlinked even while a client may still fill it."""
        accepted = control_pb2.Accepted(uid=store.record.uid)
        accepted.path = self._get_relative(make_unfinished_path(store, publishing))
        if publishing.recycles is not None:
            accepted.recycles = self._get_relative(make_path(store, publishing.recycles))
        await self._client.let_write(request, accepted)
        self._traffic.count_received(self.transport, content)

    async def get_version(self, request: int, version: VersionToSend) -> control_pb2.Done | None:
        """Sends the client the file to open. If the version was retired before it has, the client asks again."""
        store, record = version.store, version.record
        accepted = make_accepted(version, self._stores.specs.get(record.fingerprint, record.order))
        accepted.uid, accepted.path = store.record.uid, self._get_relative(make_path(store, record.version))
        self._traffic.count_sent(self.transport, 0)
        return control_pb2.Done(accepted=accepted)

    def _get_relative(self, path: FilePath) -> str:
        return str(path.relative_to(self._stores.root.path))

    def may_still_write(self, request: int) -> bool:
        """Returns whether the client has neither reported the end of its write nor been proved gone."""
        return self._client.may_still_write(request)

    def move_to_tasks(self) -> None:
        """Moves the coroutines that wait for the client into tasks."""
        self._client.move_to_tasks()


async def _look_up(store: OpenedStore, selection: Selection) -> tuple[int, NDArray[np.int64]]:
    """Returns the sum of a selection's generations, by which the client notices that its values and its tensors are not
    as of one moment; and its elements in the flattened batch. In a thread if there are very many rows."""

    def look_up() -> tuple[int, NDArray[np.int64]]:
        batch_size = store.spec.batch_size
        canonical = selection.canonicalise(batch_size, store=store.name)
        watched = canonical.compute_watched(batch_size)
        return sum_generations(store.get_generation_values()[watched]), canonical.compute_elements(batch_size)

    return look_up() if math.prod(store.spec.batch_size) <= PIECE_ROWS else await asyncio.to_thread(look_up)


async def _spread_in_pieces(store: OpenedStore, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    num_each = math.prod(store.spec.batch_size[1:])
    is_long = len(rows) * num_each > PIECE_ROWS
    return await asyncio.to_thread(spread, rows, num_each) if is_long else spread(rows, num_each)


def _make_answer(plan: RowsPlan, *, values: bytes) -> control_pb2.ServerMessage:
    message = control_pb2.ServerMessage()
    _add_rows(message.done.accepted, plan, values)
    return message


def _make_permit(plan: RowsPlan, *, values: bytes) -> control_pb2.ServerMessage:
    message = control_pb2.ServerMessage()
    _add_rows(message.accepted, plan, values)
    return message


def _add_rows(accepted: control_pb2.Accepted, plan: RowsPlan, values: bytes) -> None:
    accepted.rows, accepted.generations = encode_plan(plan)
    accepted.values = values
    for name, column in plan.columns.items():
        accepted.added.add(name=name, content=column.tobytes())


def _is_any(values: worker_pb2.PutValues) -> bool:
    return bool(values.values or values.spool_nbytes)


async def read_values(
    worker: DataWorker,
    store: OpenedStore,
    paths: Sequence[Path],
    elements: NDArray[np.int64],
    *,
    part_elements: int = _PART_ELEMENTS,
    count: Callable[[int], None] | None = None,
) -> bytes:
    """Has a worker read values for a client that cannot open the store's objects; very many a part at a time.

    Returns:
        The ValueBlock of these elements of the flattened batch.

    Raises:
        TransferAbortedError: They were changed since.
        TDServeError: What ``count`` raises, which is called with the size of each part.
    """
    blocks = []
    for start in range(0, max(len(elements), 1), part_elements):
        part = elements[start : start + part_elements]
        order = worker_pb2.Order()
        body = order.read_values
        body.store.CopyFrom(store.make_ref(worker.known_specs))
        for path in paths:
            body.keys.add(parts=path)
        body.elements = encode_rows(part)
        blocks.append((len(part), (await worker.submit(order)).values))
        if count is not None:
            count(len(blocks[-1][1]))
    return blocks[0][1] if len(blocks) == 1 else await asyncio.to_thread(join_blocks, blocks)
