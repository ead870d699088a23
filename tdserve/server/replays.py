"""Extending replays: decisions of a table, carried out by the session's worker, committed here."""

from __future__ import annotations

import asyncio
import math

import numpy as np

from tdserve.deadline import Deadline
from tdserve.errors import SelectionError
from tdserve.replay.plans import Arrival
from tdserve.replay.ring import Reservation
from tdserve.row_numbers import encode_rows, spread
from tdserve.selection import Selection, from_message
from tdserve.server.answers import Answers
from tdserve.server.arrivals import arriving
from tdserve.server.entry import Entry
from tdserve.server.redo import Redo
from tdserve.server.rule_keys import RuleKeys, group_column
from tdserve.server.samples import Samples, older_store
from tdserve.server.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.traffic import Traffic
from tdserve.server.workers import DataWorker
from tdserve.spec.tree import Path
from tdserve.v1 import content_pb2, control_pb2, worker_pb2


class Replays:
    """What writers ask of replay stores, and who reads rows by their numbers.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
        samples: Sends rows.
        rule_keys: Finds what rules look at.
        values_worker: The one worker that writes non-tensor values.
    """

    def __init__(
        self,
        stores: Stores,
        answers: Answers,
        *,
        samples: Samples,
        rule_keys: RuleKeys,
        values_worker: DataWorker,
        traffic: Traffic,
    ) -> None:
        self._stores = stores
        self._answers = answers
        self._samples = samples
        self._rule_keys = rule_keys
        self._values_worker = values_worker
        self._traffic = traffic

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
            raise older_store(entry)
        coming = arriving(entry, session.client_id, asked)
        num_rows = asked.num_rows
        reservation = await session.wait(
            entry.changed,
            lambda: table.plan_extend(num_rows),
            deadline,
            lambda: table.why_extend(num_rows),
            line=("extend", num_rows),
            give_back=table.abort,
        )
        try:
            found = await self._receive(session, request, entry, reservation, asked)
            arrival = coming.with_columns(entry, found)
            # Asked for since these rows began to come, or no tensor; meanwhile others may be asked for, or given up.
            while lacking := [path for path in entry.group_keys if group_column(path) not in arrival.groups]:
                ids = await self._rule_keys.read_ids(entry, lacking[0], reservation.rows, session)
                arrival.groups[group_column(lacking[0])] = ids
            return self._commit(session, request, entry, reservation, arrival)
        except BaseException:
            # Whoever could still write is gone: a failed receive closes its channel, a dead worker was reaped.
            table.abort(reservation)
            entry.changed.wake()
            raise

    async def read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        """Sends live rows by their numbers, without counting them as sampled."""
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        if asked.fingerprint != entry.spec_of_row().fingerprint:
            raise older_store(entry)
        plan = table.plan_read(numbers_of(from_message(asked.selection), table.live_rows(), entry.name))
        return await self._samples.send(session, request, entry, plan, tells_spec=False)

    async def _receive(
        self,
        session: ClientSession,
        request: int,
        entry: Entry,
        reservation: Reservation,
        asked: control_pb2.ExtendRequest,
    ) -> dict[Path, bytes]:
        content = asked.content
        receiving = session.order(request, is_accepted=bool(content.message_nbytes))
        ref = entry.ref(session.worker.known_specs)
        receiving.receive_rows.store.CopyFrom(ref)
        receiving.receive_rows.rows = reservation.encoded
        receiving.receive_rows.keys.extend(asked.keys)
        rule_keys = [path for path in entry.rule_keys if path in dict(entry.spec.tensors)]
        receiving.receive_rows.columns.extend(content_pb2.Path(parts=path) for path in rule_keys)
        receiving.receive_rows.content.fingerprint = content.fingerprint
        receiving.receive_rows.content.message_nbytes.extend(content.message_nbytes)
        if content.HasField("inline"):
            receiving.receive_rows.content.inline = content.inline
        receive = session.worker.order(receiving)
        values = content.values + _nothing_for(entry, asked)
        if values:
            storing = worker_pb2.Order()
            storing.put_values.store.CopyFrom(entry.ref(self._values_worker.known_specs))
            storing.put_values.values = values  # blocks one after the other are one block
            storing.put_values.elements = encode_rows(spread(reservation.rows, math.prod(entry.spec.batch_size[1:])))
            spec = entry.spec.select([tuple(key.parts) for key in asked.keys]) if asked.keys else entry.spec
            paths = [*(path for path, _ in spec.values), *_lacking(entry, asked)]
            storing.put_values.keys.extend(content_pb2.Path(parts=path) for path in paths)
            store = self._values_worker.order(storing)
            await asyncio.wait(
                {receive, store}
            )  # both, also when one fails: nobody may write after the rows are given up
            await store
        worked = await receive
        self._traffic.received(session.hello.transport, content)
        return dict(zip(rule_keys, worked.columns, strict=True))

    def _commit(
        self, session: ClientSession, request: int, entry: Entry, reservation: Reservation, arrival: Arrival
    ) -> control_pb2.Done:
        """The record goes first, then the generations: a crash between the two is repaired from the record."""
        entry.check_present()
        table = entry.replay_table()
        table.arrive(reservation, arrival)
        done = control_pb2.Done(indices=reservation.encoded)
        redo = Redo.of(entry, reservation.rows, encoded=reservation.encoded)
        state = entry.table_state()
        state["inserts"] += len(reservation)
        with self._answers.transaction(session.client_id, request, done.SerializeToString()) as txn:
            redo.save(txn)
            self._stores.save_state(entry, txn, state)
        table.commit(reservation, arrival)
        entry.changed.wake()
        return done


def _lacking(entry: Entry, asked: control_pb2.ExtendRequest) -> list[Path]:
    """Value leaves that the rows do not have."""
    if not asked.keys:
        return []
    given = {path for path, _ in entry.spec.select([tuple(key.parts) for key in asked.keys]).values}
    return [path for path, _ in entry.spec.values if path not in given]


def _nothing_for(entry: Entry, asked: control_pb2.ExtendRequest) -> bytes:
    """None for each of them: what another row had in this place is nobody's business."""
    block = control_pb2.ValueBlock()
    for _ in _lacking(entry, asked):
        block.columns.add(values=[content_pb2.Value(none=True).SerializeToString()])
    return block.SerializeToString()


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
