"""Lets writers claim rows of tables: who gets how many, and what becomes of their claims.

``server/README.md`` has reading orders of claims and recovery.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

from tdserve.base.errors import TDServeError
from tdserve.base.failpoints import reach
from tdserve.base.logs import SparseLog
from tdserve.rules.replay.allocation.promises import count_promisable
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.table import Table
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.tables.table_claims import ClaimContext, TableClaim
from tdserve.store.rows.claim_file import FOLDER, ClaimFile, has_fences
from tdserve.v1 import control_pb2

_log = logging.getLogger("tdserve.server")

NUM_REMEMBERED = 8
"""Claims of a table in a row after which their writer counts as the only one."""

CLIENTS_OF_WORKER = 8
"""A worker writes for many clients: the claim lasts while each of them extends, until control has committed rows."""

MIN_BLOCK_EXTENDS = 4
"""Smaller blocks are not worth their request."""


class Claiming:
    """Lets writers claim rows, and follows the claims to their end, also over a restart.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests.
        traffic: Counts transfers.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, traffic: Traffic) -> None:
        self._stores = stores
        self._context = ClaimContext(stores, answers, traffic)
        self._nums = count(1)
        self._writers: WeakKeyDictionary[Table, deque[bytes]] = WeakKeyDictionary()  # those that were offered last
        self._failures: WeakKeyDictionary[Table, SparseLog] = WeakKeyDictionary()

    def end_used_up(self, session: ClientSession, store: OpenedStore, num_rows: int) -> None:
        """Ends the claim of a writer that asks for rows although it has one: what is left of it is less than it asks
        for now, and next in line.

        A local client keeps a block that has enough rows, since it waits for a claim before it extends again. A data
        worker may not have seen its block yet: its sessions' next extends would come before this one.
        """
        holder = session.movers.writes.claim_holder
        own = None if holder is None else holder.claims.get(store.record.uid)
        if holder is None or own is None:
            return
        if not (holder.is_local and own.is_block and own.num_left >= num_rows):
            own.take_back()

    def offer(
        self, session: ClientSession, store: OpenedStore, asked: control_pb2.ExtendRequest
    ) -> control_pb2.Claim | None:
        """Offers a claim to the process that fills the rows of a client that has just extended a table: a local client
        itself, or its data worker. Returns the claim if the client gets it with its answer."""
        holder = session.movers.writes.claim_holder
        if holder is None or not self.is_due(session, holder, store):
            return None
        holder.preparing.add(store.record.uid)
        return session.movers.writes.take_claim(store, partial(self.grant, holder, store, asked))

    def is_due(self, session: ClientSession, holder: ClaimHolder, store: OpenedStore) -> bool:
        """Counts an extend that has asked for rows, and returns whether its writer may get a claim now. If not, the
        next extends ask for rows too."""
        if session.ended.is_set() or not self._may_be_claimed(store):
            return False
        if session.caller.grant.is_counted:  # what its writer does by itself is not counted
            return False
        if store.record.uid in holder.claims or store.record.uid in holder.preparing:
            return False
        return holder.is_local or holder.pace(store.get_table()).count_extend()

    def grant(
        self, holder: ClaimHolder, store: OpenedStore, asked: control_pb2.ExtendRequest
    ) -> control_pb2.Claim | None:
        """Returns a claim for a writer; None if there are too few rows, or others came first.

        Args:
            asked: The extend that was due.
        """
        holder.preparing.discard(store.record.uid)
        if store.record.uid in holder.claims or not self._may_be_claimed(store):
            return None
        table = store.get_table()
        for claim in tuple(table.claims):
            if not claim.is_block:  # of a writer that has come since rows were reserved: it takes the same next rows
                claim.take_back()
        if any(claim.has_failed for claim in table.claims):  # then it is not known which rows are claimed
            return None
        wished = asked.wished_claim * (1 if holder.is_local else CLIENTS_OF_WORKER)
        window = min(wished, table.state.step_rows)  # rows found filled are committed in one turn
        num_writers = self._count_writers(holder, table)
        is_block = num_writers > 1
        if is_block:
            window = count_promisable(table.ring, window, num_writers=num_writers) // asked.num_rows * asked.num_rows
        num_allowed = table.arrivals.count_claimable(window) if window else 0
        if num_allowed < asked.num_rows * (MIN_BLOCK_EXTENDS if is_block else 1):
            return None
        uid, writer = store.record.uid, holder.writer
        record = ClaimRecord(uid, writer.lock_name, writer.client_id, next(self._nums), table.ring.cursor, num_allowed)
        path = _make_path(store, record)
        try:
            file = ClaimFile.create(path, num_allowed)
        except TDServeError as error:  # for example a full disk; the client extends without a claim
            self._warn(store, error)
            return None
        try:
            record.save(self._stores.db)
        except TDServeError as error:  # no room in the catalog; the extend that asks is committed, and must not fail
            self._warn(store, error)
            file.unlink()
            return None
        promised = table.ring.promise(num_allowed) if is_block else None
        holder.claims[uid] = TableClaim(
            self._context, store, file, record, holder=holder, window=window, promised=promised
        )
        reach("claim.granted")
        granted = control_pb2.Claim(first_row=record.first_row, uid=record.uid, num=record.num)
        granted.structure, granted.is_sole = store.record.structure, not is_block
        granted.path = str(path.relative_to(self._stores.root.path))
        return granted

    def _warn(self, store: OpenedStore, error: TDServeError) -> None:
        """Logs that rows cannot be claimed, though not for each of the extends that ask for a claim until they can."""
        failures = self._failures.setdefault(store.get_table(), SparseLog(_log))
        failures.warn(f"rows of store {store.name!r} cannot be claimed: {error}")

    def _may_be_claimed(self, store: OpenedStore) -> bool:
        record = store.record
        if (
            store.waiters.is_away
            or store.is_outdated
            or store.is_leaving
            or store.spec.values
            or store.group_keys
            or store.lost
            or record.read_only
        ):
            return False
        # With "disk" its writes are answered one by one.
        return has_fences() and store.get_table().settings.is_plain_ring and record.durability != "disk"

    def _count_writers(self, holder: ClaimHolder, table: Table) -> int:
        """Notes that a writer is offered a claim; returns how many have been recently, or have one."""
        writers = self._writers.setdefault(table, deque(maxlen=NUM_REMEMBERED))
        writers.append(holder.writer.writer_id)
        return len({*writers, *(each.writer_id for each in table.claims)})

    def on_claimed(self, claimed: control_pb2.Claimed, holder: ClaimHolder | None) -> None:
        """Handles a writer's report that it has filled rows, or will not fill them.

        Args:
            holder: The writer; None if it is a data worker.
        """
        claim = self._context.active.get(claimed.num)
        if claim is None or claim.uid != claimed.uid or (holder is not None and claim.holder is not holder):
            return
        if claimed.abandons:
            claim.abandon()
        else:
            claim.table.state.catch_up()  # all of it: then readers find that nothing is left

    def catch_up(self) -> bool:
        """Commits all rows that were filled, and returns whether all of them are live."""
        are_live = [claim.catch_up() for claim in tuple(self._context.active.values())]
        return all(are_live)

    def on_session_ended(self, session: ClientSession) -> None:
        """Takes back the claims of a local client. Rows that it may still be filling wait for the proof that it is
        gone."""
        holder = session.movers.writes.claim_holder
        for claim in list(holder.claims.values()) if holder is not None and holder.is_local else ():
            claim.take_back()
            if not claim.is_settled:  # then its filled rows are committed, and the rest are free
                self._wait_for_end(session.movers.writes.lock_name, claim.abandon)

    def on_worker_lost(self, holder: ClaimHolder) -> None:
        """Ends the claims of a worker that is proved gone; the next one may become a sole writer."""
        for claim in list(holder.claims.values()):
            claim.abandon()
        for writers in self._writers.values():
            while holder.writer.writer_id in writers:
                writers.remove(holder.writer.writer_id)

    def restore(self) -> None:
        """Takes up claims after a restart: commits the rows that were filled, and waits for clients that may still fill
        others."""
        for uid in ClaimRecord.list_uids(self._stores.db):
            try:
                store = self._stores.find_uid(uid)
            except TDServeError as error:
                _log.error("rows that were claimed before the restart cannot be looked at: %s", error)
                continue
            if store is not None:
                for record, unfilled in store.unfilled:
                    self._restore(store, record, unfilled)

    def _restore(self, store: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        table = store.get_table()
        try:
            file = ClaimFile.open(_make_path(store, record))
        except TDServeError:  # it is unknown which rows were filled
            self._wait_for_end(record.lock_name, partial(self._free, store, record, unfilled))
            return
        for reservation in unfilled:
            table.ring.resume(reservation)
        claim = TableClaim(self._context, store, file, record, unfilled=unfilled)
        claim.take_back()
        if not claim.is_settled:
            self._wait_for_end(record.lock_name, claim.abandon)

    def _wait_for_end(self, lock_name: str, on_gone: Callable[[], None]) -> None:
        if self._stores.process_watch.is_gone(lock_name):
            on_gone()
        else:
            self._stores.process_watch.watch(lock_name, on_gone)

    def _free(self, store: OpenedStore, record: ClaimRecord, unfilled: list[Reservation]) -> None:
        for reservation in unfilled:
            store.get_table().ring.release(reservation)
        self._stores.db.delete("pending", record.key)
        store.waiters.wake()


def _make_path(store: OpenedStore, record: ClaimRecord) -> Path:
    return store.folder / FOLDER / record.file_name
