"""Extending replays: decisions of a table, carried out by the session's worker, committed here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.messages.row_numbers import encode_rows, spread
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.reservation import Reservation
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.server.row_write_hold import is_free, wait_for_others
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.staging_names import StagingNames, values_path
from tdserve.server.stores import Stores
from tdserve.server.tables.arrivals import arriving
from tdserve.server.tables.claims import Claiming
from tdserve.server.tables.commits import commit_in_turns, commit_rows
from tdserve.server.tables.numbers import numbers_of, plan_read
from tdserve.server.tables.policies import MadeBy
from tdserve.server.tables.reserving import reserve_rows
from tdserve.server.tables.rule_keys import RuleKeys, group_column
from tdserve.server.tables.samples import Samples, older_store
from tdserve.server.turns import free_apart, row_set_of
from tdserve.server.workers import DataWorker
from tdserve.store.catalog_db import Transaction
from tdserve.structure.tree import Path
from tdserve.v1 import content_pb2, control_pb2, worker_pb2


class Replays:
    """What writers ask of replay stores, and who reads rows by their numbers.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
        samples: Sends rows.
        rule_keys: Finds what rules look at.
        values_worker: The one worker that writes non-tensor values.
        claiming: Lets local writers claim rows.
    """

    def __init__(
        self,
        stores: Stores,
        answers: CommittedAnswers,
        *,
        samples: Samples,
        rule_keys: RuleKeys,
        values_worker: DataWorker,
        claiming: Claiming,
        traffic: Traffic,
    ) -> None:
        self._stores = stores
        self._answers = answers
        self._samples = samples
        self._rule_keys = rule_keys
        self._values_worker = values_worker
        self._claiming = claiming
        self._traffic = traffic
        self._staging = StagingNames("extend-")

    async def extend(self, session: ClientSession, request: int, asked: control_pb2.ExtendRequest) -> control_pb2.Done:
        """Reserves rows, has them filled, commits. See ``ClientSession`` for what happens to refused content.

        Raises:
            SpecMismatchError, CapacityError, DeadlineExceededError: Nothing was reserved.
            PeerLostError: The writer or its worker went away; its rows are free again.
        """
        deadline = Deadline.after(asked.timeout_s)
        entry = self._stores.get(asked.store)
        table = entry.replay_table()
        if table.claims is not None:
            table.claims.check_committed()  # this may be a retry of what they still have to bring
        if (answered := self._answers.earlier(session.client_id, request)) is not None:
            session.discard(request, asked.content)  # the client had claimed and filled rows, as was seen just now
            return control_pb2.Done.FromString(answered)
        if asked.content.fingerprint != entry.spec_of_row().fingerprint:
            raise older_store(entry)
        coming = arriving(entry, session.client_id, asked)
        made_by = MadeBy(self._stores, entry, asked)
        reservation = await reserve_rows(session, entry, asked.num_rows, deadline)
        if entry.lost:
            with self._stores.db.transaction(is_decided=True) as txn:
                txn.update("pending", entry.lost.replace_written(RowSet.of(reservation.rows), ()))
        try:
            found = await self._receive(session, request, entry, reservation, asked)
            arrival = coming.with_columns(entry, found)
            # Trajectories are linked in the turn of the commit: no rows of the same writer may come between them.
            is_long = len(reservation) > table.step_rows and table.columns.trajectories is None
            async with entry.write_lock if is_long else nullcontext():  # which those need who ask for other groups
                # Asked for since these rows began to come, or no tensor; meanwhile others are asked for, or given up.
                while lacking := [path for path in entry.group_keys if group_column(path) not in arrival.groups]:
                    ids = await self._rule_keys.read_ids(entry, lacking[0], reservation.rows, session)
                    arrival = replace(arrival, groups={**arrival.groups, group_column(lacking[0]): ids})
                if (answered := self._answers.earlier(session.client_id, request)) is not None:
                    self._give_up(session, request, entry, reservation)  # it was tried over another session
                    return control_pb2.Done.FromString(answered)
                settle = partial(made_by.settle, arrival)
                done = await self._commit(session, request, entry, reservation, settle, is_long=is_long)
        except BaseException:
            self._give_up(session, request, entry, reservation)
            raise
        if asked.wished_claim and (claim := self._claiming.offer(session, entry, asked)) is not None:
            done.claim.CopyFrom(claim)
        return done

    async def read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        """Sends live rows by their numbers, without counting them as sampled; those that are written to when that is
        over."""
        deadline = Deadline.after(asked.timeout_s)
        while True:
            entry = self._stores.get(asked.store)
            table = entry.replay_table()
            if asked.fingerprint != entry.spec_of_row().fingerprint:
                raise older_store(entry)
            numbers = await numbers_of(from_message(asked.selection), table, lost=entry.lost.row_set)
            if not (entry.lost or entry.writes):
                break
            rows = await row_set_of(Selection((numbers,)), (entry.record.capacity,))
            entry.lost.check(rows, store=entry.name, remedy="they leave the table: extend it by others")
            if is_free(entry, rows):
                break
            await wait_for_others(session, entry, rows, deadline)  # by then it may mean other rows
        plans = [await plan_read(table, numbers)]
        del numbers
        try:
            return await self._samples.send(session, request, entry, plans[0], tells_spec=False)
        finally:
            free_apart(plans, num_rows=len(plans[0].rows))

    async def _receive(
        self,
        session: ClientSession,
        request: int,
        entry: OpenedStore,
        reservation: Reservation,
        asked: control_pb2.ExtendRequest,
    ) -> dict[Path, bytes]:
        content = asked.content
        rule_keys = [path for path in entry.rule_keys if path in dict(entry.spec.tensors)]
        values = self._values(entry, reservation, asked)
        if session.local is not None:
            session.local.spooled(content, values)
            if entry.spec.tensors and not (values.values or values.spool_nbytes):
                accepted = self._let_write(session.local, entry, reservation, rule_keys)
                written = await session.local.filled(request, accepted)
                self._traffic.received(session.transport, content)
                return dict(zip(rule_keys, written.columns, strict=True))
        follow = bool(content.values_nbytes) and session.local is None
        with self._staging.taken(entry, is_needed=follow and session.worker is not self._values_worker) as staging:
            receive: asyncio.Future[Any]
            if session.local is not None:
                if entry.spec.tensors:
                    accepted = self._let_write(session.local, entry, reservation, rule_keys)
                    receive = session.local.written(request, accepted)
                else:  # there is nothing that it could write, and it is not asked
                    session.local.check_writes(f"writing to {entry.name!r}")
                    receive = asyncio.get_running_loop().create_future()
                    receive.set_result(control_pb2.Written())
            else:
                receiving = self._receiving(session, request, entry, reservation, asked, rule_keys)
                receiving.receive_rows.spool = values_path(staging)
                if follow and not staging:
                    receiving.receive_rows.put_values.CopyFrom(values)
                receive = session.worker.order(receiving)
            if staging:
                await receive
                values.spool, values.spool_nbytes = values_path(staging), content.values_nbytes
            if values.spool_nbytes or (values.values and not follow) or staging:
                storing = worker_pb2.Order(put_values=values)
                storing.put_values.store.CopyFrom(entry.ref(self._values_worker.known_specs))
                store = self._values_worker.order(storing)
                # Both, also when one fails: nobody may write after the rows are given up.
                await asyncio.wait({receive, store})
                faults = [future.exception() for future in (store, receive)]  # asyncio complains of those not looked at
                if faults[0] is not None:
                    raise faults[0]
            worked = await receive
        self._traffic.received(session.transport, content)
        return dict(zip(rule_keys, worked.columns, strict=True))

    def _values(
        self, entry: OpenedStore, reservation: Reservation, asked: control_pb2.ExtendRequest
    ) -> worker_pb2.PutValues:
        """What is to be done with the values of the rows, but for the store."""
        if not (entry.spec.values or asked.content.values or asked.content.values_nbytes):
            return worker_pb2.PutValues()
        spec = entry.spec.select([tuple(key.parts) for key in asked.keys]) if asked.keys else entry.spec
        keys = spec.memo.get("value_keys")
        if keys is None:
            keys = spec.memo["value_keys"] = [content_pb2.Path(parts=path) for path, _ in spec.values]
        lacking = _lacking(entry, asked)
        return worker_pb2.PutValues(
            values=asked.content.values + _nothing_for(lacking),  # blocks one after the other are one block
            keys=[*keys, *(content_pb2.Path(parts=path) for path in lacking)],
            elements=encode_rows(spread(reservation.rows, math.prod(entry.spec.batch_size[1:]))),
            is_whole=not lacking,  # the values are: a tensor that comes later does not matter to them
            is_bundled=asked.content.is_bundled,
        )

    def _receiving(
        self,
        session: ClientSession,
        request: int,
        entry: OpenedStore,
        reservation: Reservation,
        asked: control_pb2.ExtendRequest,
        rule_keys: Sequence[Path],
    ) -> worker_pb2.Order:
        content = asked.content
        receiving = session.order(request, is_accepted=bool(content.message_nbytes))
        body = receiving.receive_rows
        body.store.CopyFrom(entry.ref(session.worker.known_specs))
        body.rows = reservation.encoded
        body.keys.extend(asked.keys)
        body.columns.extend(content_pb2.Path(parts=path) for path in rule_keys)
        body.content.fingerprint = content.fingerprint
        body.content.message_nbytes.extend(content.message_nbytes)
        body.content.values_nbytes = content.values_nbytes
        if content.HasField("inline"):
            body.content.inline = content.inline
        return receiving

    def _let_write(
        self, local: LocalClient, entry: OpenedStore, reservation: Reservation, rule_keys: Sequence[Path]
    ) -> control_pb2.Accepted:
        """What lets a local client fill its rows. They are on record before it knows of them."""
        local.check_writes(f"writing to {entry.name!r}")
        _record(entry, local, reservation).save(self._stores.db)
        accepted = control_pb2.Accepted(uid=entry.record.uid, rows=reservation.encoded)
        accepted.columns.extend(content_pb2.Path(parts=path) for path in rule_keys)
        return accepted

    async def _commit(
        self,
        session: ClientSession,
        request: int,
        entry: OpenedStore,
        reservation: Reservation,
        settle: Callable[[], Arrival],
        *,
        is_long: bool,
    ) -> control_pb2.Done:
        local = session.local

        def forget(txn: Transaction) -> None:
            if local is not None:
                txn.delete("pending", _record(entry, local, reservation).key)

        stores, answers, client_id = self._stores, self._answers, session.client_id
        if is_long:
            return await commit_in_turns(
                stores, answers, entry, reservation, settle, client_id=client_id, request=request, also=forget
            )
        return commit_rows(
            stores, answers, entry, reservation, settle(), client_id=client_id, request=request, also=forget
        )

    def _give_up(self, session: ClientSession, request: int, entry: OpenedStore, reservation: Reservation) -> None:
        """Frees rows that were not filled, once nobody can write them any more.

        A failed receive has closed its channel, a dead worker was reaped; a local client may be stopped in the middle.
        """
        local = session.local
        if local is not None and local.may_still_write(request):
            self._stores.unfinished.hold_back(entry, reservation, _record(entry, local, reservation))
            return
        entry.replay_table().abort(reservation)
        if local is not None:
            self._stores.db.delete("pending", _record(entry, local, reservation).key)
        entry.changed.wake()


def _record(entry: OpenedStore, local: LocalClient, reservation: Reservation) -> ReservedRows:
    return ReservedRows(entry.record.uid, local.lock_name, reservation.num, reservation.encoded)


def _lacking(entry: OpenedStore, asked: control_pb2.ExtendRequest) -> list[Path]:
    """Value leaves that the rows do not have."""
    if not asked.keys:
        return []
    given = {path for path, _ in entry.spec.select([tuple(key.parts) for key in asked.keys]).values}
    return [path for path, _ in entry.spec.values if path not in given]


def _nothing_for(lacking: Sequence[Path]) -> bytes:
    """None for each of them: what another row had in this place is nobody's business."""
    block = control_pb2.ValueBlock()
    for _ in lacking:
        block.columns.add(values=[content_pb2.Value(none=True).SerializeToString()])
    return block.SerializeToString()
