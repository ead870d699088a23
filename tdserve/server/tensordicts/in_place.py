"""Writes of local clients to existing rows: the client copies straight over the old content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tdserve.base.deadline import Deadline
from tdserve.base.errors import PeerLostError
from tdserve.base.failpoints import reach
from tdserve.messages.content import decode_paths
from tdserve.messages.row_sets import RowSet
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.execution.inline_tasks import ensure_task
from tdserve.server.mutations.row_write_hold import RowDemands, hold_rows
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.v1 import control_pb2


class InPlace:
    """Lets local clients overwrite rows, and records which rows are lost if one dies on the way.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers) -> None:
        self._stores = stores
        self._answers = answers
        self._unfinished_writes = stores.unfinished_writes

    async def write(
        self,
        session: ClientSession,
        client: LocalClient,
        request: int,
        store: OpenedStore,
        asked: control_pb2.WriteRequest,
        rows: RowSet,
        wanted: RowDemands,
        store_values: Callable[[], Awaitable[None]],
    ) -> control_pb2.Done:
        """Replaces a selection. Several clients may write different rows at the same time.

        Args:
            rows: Rows of the selection; no other request writes them.
            wanted: What it demands of the rows.
            store_values: Stores the write's non-tensor values, whole or not at all.

        Raises:
            TDServeError: Nothing was written.
            PeerLostError: The client was lost in the middle: the rows are lost until they are written again.
        """
        keys = tuple(decode_paths(asked.keys))
        overwrite = Overwrite(store.record.uid, client.lock_name, request, rows, keys)
        async with hold_rows(store, rows, keys, wanted) as held:
            overwrite.save(self._stores.db)
        reach("in-place.recorded")
        brings_values, has_values = bool(asked.content.values or asked.content.spool_nbytes), False
        try:
            if brings_values:  # what replaces values cannot be taken back: look first at what came with the request
                await ensure_task()
            _check_wanted(session, request)
            if brings_values:
                try:
                    await store_values()
                except PeerLostError:  # any part of it may be done
                    has_values = True
                    raise
                has_values = True
            if not keys or store.spec.select(keys).tensors:
                await client.let_write(
                    request, control_pb2.Accepted(uid=store.record.uid, structure=store.record.structure)
                )
        except BaseException:
            if has_values or client.is_writing(request):
                held.end()
                self._unfinished_writes.lose(store, overwrite)
            else:
                await held.let_go(is_written=False, is_untouched=True, then=lambda: self._forget(overwrite))
            store.waiters.wake()
            raise
        done = control_pb2.Done(version=held.next_version)
        # Recorded before it becomes visible: a retry after a crash in between must not write over later content.
        with self._answers.begin_transaction(
            session.client_id, request, done.SerializeToString(), is_decided=True
        ) as txn:
            overwrite.commit(txn)
            txn.update("pending", store.lost.replace_written(rows, keys))
        reach("in-place.answered")
        await held.let_go(is_written=True, then=lambda: self._stores.db.delete_later("pending", overwrite.key))
        store.waiters.wake()
        return done

    def _forget(self, overwrite: Overwrite) -> None:
        with self._stores.db.begin_transaction(is_decided=True) as txn:
            overwrite.forget(txn)

    async def wait_for_writers(
        self, session: ClientSession, store: OpenedStore, rows: RowSet, deadline: Deadline
    ) -> None:
        """Waits until no process that lost these rows can still write into them.

        Raises:
            DeadlineExceededError: Such a process still exists.
        """
        if store.lost:

            def is_writer_gone() -> bool:
                return not self._unfinished_writes.may_be_written(store, rows)

            await session.wait_until(
                store.waiters,
                is_writer_gone,
                deadline,
                lambda: f"the end of the process that stopped while it overwrote rows of {store.name!r}",
            )


def _check_wanted(session: ClientSession, request: int) -> None:
    """Raises CancelledError if the client has given a request up, or its session has ended: it gets no permit."""
    if session.ended.is_set() or request in session.cancelled_requests:
        raise asyncio.CancelledError
