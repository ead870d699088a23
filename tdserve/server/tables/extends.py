"""Extends of replay tables: the table decides, the session's mover fills the rows, and they are committed here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.failpoints import reach
from tdserve.messages.long_lists import find_columns
from tdserve.messages.row_numbers import PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Arrival
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.execution.turns import drop_references
from tdserve.server.execution.waiting import wait_any
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import RowsToFill
from tdserve.server.tables.arrivals import ExtendColumns, decode_extend_columns
from tdserve.server.tables.claiming import Claiming
from tdserve.server.tables.commits import commit_in_turns, commit_rows
from tdserve.server.tables.policy_versions import ExtendPolicyVersions
from tdserve.server.tables.reserving import reserve_rows
from tdserve.server.tables.rule_keys import Buffer, RuleKeys, name_group_column
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2


class Extends:
    """Serves the writers of replay tables.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        rule_keys: Reads what the tables' rules need.
        claiming: Lets writers claim rows.
        values_worker: The worker that stores values.
    """

    def __init__(
        self,
        stores: Stores,
        answers: CommittedAnswers,
        *,
        rule_keys: RuleKeys,
        claiming: Claiming,
        values_worker: DataWorker,
    ) -> None:
        self._stores = stores
        self._answers = answers
        self._rule_keys = rule_keys
        self._claiming = claiming
        self._values_worker = values_worker

    async def extend(self, session: ClientSession, request: int, asked: control_pb2.ExtendRequest) -> control_pb2.Done:
        """Reserves rows, has them filled, and commits them. For refused content see ``ClientSession.discard``.

        Raises:
            WrongStateError: The client means another kind of store. Nothing was reserved.
            SpecMismatchError, CapacityError, DeadlineExceededError: Nothing was reserved.
            TransferAbortedError: An earlier attempt has filled claimed rows, for whose commit there is no room yet.
            PeerLostError: The writer or its worker was lost; its rows are free again.
        """
        deadline = Deadline.after(asked.timeout_s)
        store = self._stores.get(asked.store)
        store.check_kind(asked.kind)
        columns = await self._check_and_decode(session, request, store, asked)
        if asked.wished_claim:
            self._claiming.end_used_up(session, store, asked.num_rows)
        policy_versions = ExtendPolicyVersions(self._stores, store, asked, columns)
        if store.spec.values:  # a later extend would overtake the retry of one that fails for lack of it
            await _wait_for_start(self._values_worker, session, deadline)
        reservation = await reserve_rows(session, store, asked.num_rows, deadline)
        rows = RowsToFill(store, reservation, asked)
        try:
            self._forget_lost(rows)
            reach("extend.reserved")
            arrival = await self._fill(session, request, rows, columns)
            done = await self._commit(session, request, rows, policy_versions, arrival)
        except BaseException:
            session.movers.writes.give_up_rows(request, rows)
            raise
        last_references: list[object] = [reservation, rows, policy_versions, arrival, columns]
        del reservation, rows, policy_versions, arrival, columns
        drop_references(last_references, num_rows=asked.num_rows)
        if asked.wished_claim and (claim := self._claiming.offer(session, store, asked)) is not None:
            done.claim.CopyFrom(claim)
        return done

    def _forget_lost(self, rows: RowsToFill) -> None:
        """Takes reserved rows off the list of lost ones: what they had is not read."""
        lost = rows.store.lost
        before = lost.overwrites
        if not before:
            return
        try:
            with self._stores.db.begin_transaction(is_decided=True) as txn:
                txn.update("pending", lost.replace_written(RowSet.from_rows(rows.reservation.rows), ()))
        except BaseException:
            lost.overwrites = before
            raise

    async def _check_and_decode(
        self, session: ClientSession, request: int, store: OpenedStore, asked: control_pb2.ExtendRequest
    ) -> ExtendColumns:
        """Checks an extend before rows are reserved; returns the data that it has for them."""
        for claim in store.get_table().claims:
            claim.check_committed(session.client_id, request)
        if asked.content.fingerprint != store.spec.fingerprint:
            raise store.make_older_store_error()
        if any(column.file for column in find_columns(asked)):
            return await asyncio.to_thread(decode_extend_columns, store, session.client_id, asked)
        return decode_extend_columns(store, session.client_id, asked)

    async def _fill(self, session: ClientSession, request: int, rows: RowsToFill, columns: ExtendColumns) -> Arrival:
        """Has reserved rows filled; returns what came with them, with the columns that the table's rules need."""
        store = rows.store
        store.check_current()  # while it waited for room, leaves may have come
        found: Mapping[Path, Buffer] = await session.movers.writes.put_rows(request, rows)
        reach("extend.filled")
        if len(found) < len(rows.rule_leaves):
            found = await self._rule_keys.read_columns(store, rows.rule_leaves, rows.reservation.rows, session)
        if len(rows.reservation) > PIECE_ROWS:
            return await asyncio.to_thread(columns.make_arrival, store, found)
        return columns.make_arrival(store, found)

    async def _commit(
        self,
        session: ClientSession,
        request: int,
        rows: RowsToFill,
        policy_versions: ExtendPolicyVersions,
        arrival: Arrival,
    ) -> control_pb2.Done:
        """Commits filled rows, unless an earlier attempt, over another session, has been faster."""
        store, table = rows.store, rows.store.get_table()
        is_long = len(rows.reservation) > table.state.step_rows
        # write_lock keeps new groups out; link_lock waits for a long extend that links its rows.
        has_links = table.columns.trajectories is not None
        async with store.write_lock if is_long else store.link_lock if has_links else nullcontext():
            # Groups that were requested while these rows were filled, and groups by values. During a read, more may be
            # requested or given up.
            while lacking := [path for path in store.group_keys if name_group_column(path) not in arrival.groups]:
                ids = await self._rule_keys.read_ids(store, lacking[0], rows.reservation.rows, session)
                arrival = replace(arrival, groups={**arrival.groups, name_group_column(lacking[0]): ids})
            if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                session.movers.writes.give_up_rows(request, rows)
                return answered
            settle = partial(policy_versions.settle, arrival)
            arguments = self._stores, self._answers, store, rows.reservation
            forget = partial(session.movers.writes.forget_rows, rows)
            if is_long:
                client_id = session.client_id
                return await commit_in_turns(*arguments, settle, client_id=client_id, request=request, also=forget)
            extend = ClaimedRows(session.client_id, request, len(rows.reservation))
            return commit_rows(*arguments, settle(), [extend], also=forget)


async def _wait_for_start(worker: DataWorker, session: ClientSession, deadline: Deadline) -> None:
    """Waits until a worker has started, while there is time; after that an order to it fails."""
    if not worker.ready.is_set():
        await inline_tasks.ensure_task()
        with session.mark_waiting():
            await wait_any((worker.ready, session.ended), timeout_s=deadline.remaining_s)
