"""Extending and sampling: decisions of a replay's table, carried out by the session's worker, committed here."""

from __future__ import annotations

import asyncio

import numpy as np

from tdserve.content import rows_layout
from tdserve.deadline import Deadline
from tdserve.errors import SelectionError, SpecMismatchError
from tdserve.replay.ring import Reservation
from tdserve.replay.table import RowsPlan
from tdserve.selection import Selection, from_message
from tdserve.server.answers import Answers
from tdserve.server.entry import Entry
from tdserve.server.redo import Redo
from tdserve.server.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.traffic import Traffic
from tdserve.server.workers import DataWorker
from tdserve.v1 import content_pb2, control_pb2, worker_pb2


class Replays:
    """What sessions ask of replay stores.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
        values_worker: The one worker that writes non-tensor values.
        inline_bytes: Content up to this size rides in messages.
    """

    def __init__(
        self, stores: Stores, answers: Answers, *, values_worker: DataWorker, traffic: Traffic, inline_bytes: int
    ) -> None:
        self._stores = stores
        self._answers = answers
        self._values_worker = values_worker
        self._traffic = traffic
        self._inline_bytes = inline_bytes
        self._rng = np.random.default_rng()

    async def extend(self, session: ClientSession, request: int, asked: control_pb2.ExtendRequest) -> control_pb2.Done:
        """Reserves rows, has them filled, commits. See ``ClientSession`` for what happens to refused content.

        Raises:
            SpecMismatchError, CapacityError, DeadlineExceededError: Nothing was reserved.
            PeerLostError: The writer or its worker went away; its rows are free again.
        """
        deadline = Deadline.after(asked.timeout_s)
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        assert entry.row_spec is not None
        if asked.content.fingerprint != entry.row_spec.fingerprint:
            raise SpecMismatchError(
                store=entry.name, key="", expected="the structure of its rows", actual="that of an older store"
            )
        reservation = await session.wait(
            entry.changed,
            lambda: table.plan_extend(asked.num_rows),
            deadline,
            lambda: f"room for {asked.num_rows} rows in {entry.name!r} ({table.ring.num_reserved} are being written)",
        )
        try:
            await self._receive(session, request, entry, reservation, asked)
        except BaseException:
            # Whoever could still write is gone: a failed receive closes its channel, a dead worker was reaped.
            table.abort(reservation)
            entry.changed.wake()
            raise
        return self._commit(session, request, entry, reservation)

    async def sample(
        self, session: ClientSession, request: int, asked: control_pb2.SampleRequest
    ) -> control_pb2.Done | None:
        """Draws rows and has them sent. None: Accepted was sent, the content follows over the channel.

        Raises:
            DeadlineExceededError: The limiter let nothing through in time; the message says what it waits for.
        """
        deadline = Deadline.after(asked.timeout_s)
        entry = await self._stores.wait(asked.store, deadline)
        table = entry.replay_table()
        num_batches = max(asked.num_batches, 1)
        plan = await session.wait(
            entry.changed,
            lambda: table.plan_sample(asked.num_rows, num_batches, rng=self._rng),
            deadline,
            lambda: f"a sample of {asked.num_rows} rows from {entry.name!r}: {table.why()}; it",
        )
        return await self._send(session, request, entry, plan, known=asked.fingerprint)

    async def read(self, session: ClientSession, request: int, asked: control_pb2.ReadRequest) -> control_pb2.Done | None:
        """Sends live rows by their numbers, without counting them as sampled."""
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        plan = table.plan_read(numbers_of(from_message(asked.selection), table.live_rows(), entry.name))
        return await self._send(session, request, entry, plan, known=asked.fingerprint)

    async def _receive(
        self,
        session: ClientSession,
        request: int,
        entry: Entry,
        reservation: Reservation,
        asked: control_pb2.ExtendRequest,
    ) -> None:
        content = asked.content
        receiving = session.order(request, is_accepted=bool(content.message_nbytes))
        ref = entry.ref(session.worker.known_specs)
        receiving.receive_rows.store.CopyFrom(ref)
        receiving.receive_rows.rows = reservation.rows.tobytes()
        receiving.receive_rows.content.fingerprint = content.fingerprint
        receiving.receive_rows.content.message_nbytes.extend(content.message_nbytes)
        if content.HasField("inline"):
            receiving.receive_rows.content.inline = content.inline
        works = [session.worker.order(receiving)]
        if content.values:
            storing = worker_pb2.Order()
            storing.put_values.store.CopyFrom(entry.ref(self._values_worker.known_specs))
            storing.put_values.values = content.values
            storing.put_values.elements = reservation.rows.tobytes()
            storing.put_values.keys.extend(content_pb2.Path(parts=path) for path, _ in entry.spec.values)
            works.append(self._values_worker.order(storing))
        done = await asyncio.gather(*works, return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        self._traffic.received(session.hello.transport, content)

    def _commit(
        self, session: ClientSession, request: int, entry: Entry, reservation: Reservation
    ) -> control_pb2.Done:
        """The record goes first, then the generations: a crash between the two is repaired from the record."""
        table = entry.replay_table()
        done = control_pb2.Done(indices=reservation.rows.tobytes())
        redo = Redo.of(entry, reservation.rows)
        state = table.state()
        state["inserts"] += len(reservation)
        with self._stores.db.transaction() as txn:
            redo.save(txn)
            self._stores.save_state(entry, txn, state)
            self._answers.record(txn, session.client_id, request, done.SerializeToString())
        table.commit(reservation)
        entry.changed.wake()
        return done

    async def _send(
        self, session: ClientSession, request: int, entry: Entry, plan: RowsPlan, *, known: bytes
    ) -> control_pb2.Done | None:
        assert entry.row_spec is not None
        nbytes = sum(rows_layout(entry.spec, len(plan.rows)).message_nbytes)
        is_inline = nbytes <= self._inline_bytes
        has_values = bool(entry.spec.values)
        order = session.order(request, is_accepted=not is_inline and not has_values)
        order.send_rows.store.CopyFrom(entry.ref(session.worker.known_specs))
        order.send_rows.rows = plan.rows.tobytes()
        order.send_rows.generations = plan.generations.tobytes()
        order.send_rows.inline = is_inline
        accepted = control_pb2.Accepted(num_rows=len(plan.rows), fingerprint=entry.row_spec.fingerprint)
        if known != entry.row_spec.fingerprint:
            accepted.spec.CopyFrom(self._stores.message_of(entry.row_spec))
        return await self._traffic.read(session, request, order, accepted, announces=order.is_accepted)


def numbers_of(selection: Selection, live: np.ndarray, store: str) -> np.ndarray:
    """Row numbers that an index means: integers are row numbers, slices and masks choose among the live rows.

    Negative positions count from behind the last live row, so that ``[-1]`` is the live row of the highest number.

    Raises:
        SelectionError: The index does not fit, or has more than one dimension.
    """
    num_numbers = int(live[-1]) + 1 if len(live) else 0
    canonical = selection.canonical((num_numbers,), store=store)
    if canonical.is_everything:
        return live
    item = canonical.items[0]
    if len(canonical.items) > 1 or item is None or item is Ellipsis:
        raise SelectionError(selection=repr(selection), reason=f"rows of {store!r} have one dimension to choose from")
    if isinstance(item, int):
        return np.array([item], np.int64)
    if isinstance(item, np.ndarray) and item.dtype != np.bool_:
        return item.reshape(-1).astype(np.int64)
    chosen = np.arange(num_numbers)[item]
    return np.asarray(chosen[np.isin(chosen, live)])
