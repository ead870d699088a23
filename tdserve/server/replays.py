"""Extending and sampling: decisions of a replay's table, carried out by the session's worker, committed here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from tdserve.content import rows_layout
from tdserve.deadline import Deadline
from tdserve.errors import InvalidRequestError, SelectionError, SpecMismatchError
from tdserve.replay.ring import Reservation
from tdserve.replay.table import RowsPlan
from tdserve.row_numbers import encode_rows, spread
from tdserve.selection import Selection, from_message
from tdserve.server.answers import Answers
from tdserve.server.entry import Entry
from tdserve.server.redo import Redo
from tdserve.server.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.traffic import Traffic
from tdserve.server.workers import DataWorker
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

MAX_SAMPLE_ROWS = 1 << 24
"""Of one request: row numbers and generations of more would take this process, which serves everybody, 256 MiB."""


class Replays:
    """What sessions ask of replay stores.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
        values_worker: The one worker that writes non-tensor values.
    """

    def __init__(self, stores: Stores, answers: Answers, *, values_worker: DataWorker, traffic: Traffic) -> None:
        self._stores = stores
        self._answers = answers
        self._values_worker = values_worker
        self._traffic = traffic
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
        if asked.content.fingerprint != entry.spec_of_row().fingerprint:
            raise _older_store(entry)
        reservation = await session.wait(
            entry.changed,
            lambda: table.plan_extend(asked.num_rows),
            deadline,
            lambda: f"room for {asked.num_rows} rows in {entry.name!r} ({table.ring.num_reserved} are being written)",
        )
        try:
            await self._receive(session, request, entry, reservation, asked)
            return self._commit(session, request, entry, reservation)
        except BaseException:
            # Whoever could still write is gone: a failed receive closes its channel, a dead worker was reaped.
            table.abort(reservation)
            entry.changed.wake()
            raise

    async def sample(
        self, session: ClientSession, request: int, asked: control_pb2.SampleRequest
    ) -> control_pb2.Done | None:
        """Draws rows and has them sent. None: Accepted was sent, the content follows over the channel.

        Raises:
            StoreNotFoundError: It was deleted: who samples has seen it.
            DeadlineExceededError: The limiter let nothing through in time; the message says what it waits for.
        """
        deadline = Deadline.after(asked.timeout_s)
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        if asked.fingerprint and asked.fingerprint != entry.spec.fingerprint:
            raise _older_store(entry)
        num_batches = max(asked.num_batches, 1)
        if asked.num_rows * num_batches > MAX_SAMPLE_ROWS:
            reason = f"{asked.num_rows} rows in {num_batches} batches are more than {MAX_SAMPLE_ROWS}"
            raise InvalidRequestError(argument="num_rows", reason=reason)
        if asked.message_nbytes:
            plan = table.plan_sample(asked.num_rows, num_batches, rng=self._rng)
            return await self._send_expected(session, request, entry, plan, asked)
        plan = await session.wait(
            entry.changed,
            lambda: table.plan_sample(asked.num_rows, num_batches, rng=self._rng),
            deadline,
            lambda: f"{asked.num_rows * num_batches} rows: {table.why()}",
        )
        return await self._send(session, request, entry, plan, tells_spec=not asked.fingerprint)

    async def read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        """Sends live rows by their numbers, without counting them as sampled."""
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        if asked.fingerprint != entry.spec_of_row().fingerprint:
            raise _older_store(entry)
        plan = table.plan_read(numbers_of(from_message(asked.selection), table.live_rows(), entry.name))
        return await self._send(session, request, entry, plan, tells_spec=False)

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
        receiving.receive_rows.rows = reservation.encoded
        receiving.receive_rows.content.fingerprint = content.fingerprint
        receiving.receive_rows.content.message_nbytes.extend(content.message_nbytes)
        if content.HasField("inline"):
            receiving.receive_rows.content.inline = content.inline
        receive = session.worker.order(receiving)
        if content.values:
            storing = worker_pb2.Order()
            storing.put_values.store.CopyFrom(entry.ref(self._values_worker.known_specs))
            storing.put_values.values = content.values
            storing.put_values.elements = encode_rows(spread(reservation.rows, math.prod(entry.spec.batch_size[1:])))
            storing.put_values.keys.extend(content_pb2.Path(parts=path) for path, _ in entry.spec.values)
            store = self._values_worker.order(storing)
            await asyncio.wait(
                {receive, store}
            )  # both, also when one fails: nobody may write after the rows are given up
            await store
        await receive
        self._traffic.received(session.hello.transport, content)

    def _commit(self, session: ClientSession, request: int, entry: Entry, reservation: Reservation) -> control_pb2.Done:
        """The record goes first, then the generations: a crash between the two is repaired from the record."""
        entry.check_present()
        table = entry.replay_table()
        done = control_pb2.Done(indices=reservation.encoded)
        redo = Redo.of(entry, reservation.rows, encoded=reservation.encoded)
        state = table.state()
        state["inserts"] += len(reservation)
        with self._answers.transaction(session.client_id, request, done.SerializeToString()) as txn:
            redo.save(txn)
            self._stores.save_state(entry, txn, state)
        table.commit(reservation)
        entry.changed.wake()
        return done

    async def _send_expected(
        self,
        session: ClientSession,
        request: int,
        entry: Entry,
        plan: RowsPlan | None,
        asked: control_pb2.SampleRequest,
    ) -> control_pb2.Done | None:
        """Sends what the client already waits for; void, when there is nothing to grant now."""
        if plan is None:
            session.send_void(request, asked.message_nbytes)
            return control_pb2.Done(must_wait=True)
        if entry.spec.values or not _is_expected(entry, plan, asked.message_nbytes):
            raise _older_store(entry)
        order = self._sending(session, request, entry, plan)
        order.send_rows.inline = False
        order.is_accepted = True
        session.accepted_requests.add(request)
        self._traffic.sent(session.hello.transport, (await session.worker.order(order)).nbytes_moved)
        return None

    async def _send(
        self, session: ClientSession, request: int, entry: Entry, plan: RowsPlan, *, tells_spec: bool
    ) -> control_pb2.Done | None:
        row_spec = entry.spec_of_row()
        order = self._sending(session, request, entry, plan)
        order.is_accepted = not order.send_rows.inline and not entry.spec.values
        accepted = control_pb2.Accepted(num_rows=len(plan.rows), fingerprint=row_spec.fingerprint)
        if tells_spec:
            accepted.spec.CopyFrom(self._stores.message_of(row_spec))
        return await self._traffic.read(session, request, order, accepted, announces=order.is_accepted)

    def _sending(self, session: ClientSession, request: int, entry: Entry, plan: RowsPlan) -> worker_pb2.Order:
        order = session.order(request)
        order.send_rows.store.CopyFrom(entry.ref(session.worker.known_specs))
        order.send_rows.rows = encode_rows(plan.rows)
        order.send_rows.generations = plan.generations.tobytes()
        order.send_rows.inline = sum(rows_layout(entry.spec, len(plan.rows)).message_nbytes) <= session.inline_limit(
            request
        )
        return order


def _older_store(entry: Entry) -> SpecMismatchError:
    expected, actual = "the structure of its rows", "that of an older store of this name"
    return SpecMismatchError(store=entry.name, key="", expected=expected, actual=actual)


def _is_expected(entry: Entry, plan: RowsPlan, message_nbytes: Sequence[int]) -> bool:
    """Whether the client waits for just the messages that these rows make."""
    return rows_layout(entry.spec, len(plan.rows)).message_nbytes == tuple(message_nbytes)


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
