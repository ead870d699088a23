"""Rows that local clients were writing when they, or the server, ended; they wait for proof that the writers are
gone.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from operator import or_, sub

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import KeyNotFoundError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.plans import Departure
from tdserve.server.execution.turns import run_without_turns
from tdserve.server.execution.waiting import retrieve_exception
from tdserve.server.mutations.row_write_hold import RowWriteHold
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.recovery.journal import JOURNAL, Journal
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.structure.trees.tree import Spec

RETRY_GRACE_S = 5.0
"""Time in which a writer that outlived a restart of the server reconnects and repeats what was interrupted: gRPC
tries at least every 2 s. It is counted from the opening of sessions, and again from the release of the lock of its
earlier session, which it holds as long as it is at work, or stopped."""


class UnfinishedWrites:
    """Unfinished rows, which are kept from other writers, also across a restart.

    Args:
        db: Catalog that records them.
        process_watch: Finds out which processes are gone.
    """

    def __init__(self, db: CatalogDB, process_watch: ProcessWatch) -> None:
        self._db = db
        self._process_watch = process_watch
        self._dropping: dict[asyncio.Task[None], str] = {}  # with the uids of their stores
        self._awaiting_sessions: (
            list[OpenedStore] | None
        ) = []  # whose grace begins when sessions can be opened; None: they can

    def may_be_written(self, store: OpenedStore, rows: RowSet) -> bool:
        """Returns whether a process that lost these rows can still write into them: a stopped one may resume."""
        return bool(store.lost) and not all(map(self._process_watch.is_gone, store.lost.find_writers(rows)))

    def is_dropping(self, store: OpenedStore) -> bool:
        """Returns whether lost rows are just being removed from a table, which takes several turns."""
        return store.record.uid in self._dropping.values()

    def hold_back(self, store: OpenedStore, reservation: Reservation, record: ReservedRows) -> None:
        """Quarantines reserved rows whose writer has disconnected until it is proved gone."""
        store.get_table().ring.quarantine(reservation)
        self._process_watch.watch(record.lock_name, partial(self._release, store, reservation, record))

    def lose(self, store: OpenedStore, overwrite: Overwrite) -> None:
        """Marks live rows as lost: their writer has left them half written."""
        store.lost.overwrites.append(overwrite)
        if store.table is None:
            store.get_generation_values()[-1] |= 1  # the store's own number, at which alone a read of everything looks
        self._process_watch.watch(overwrite.lock_name, partial(self._let_go, store, overwrite))

    def find_reserved(self, uid: str) -> list[ReservedRows]:
        """Returns the rows of a store that local writers from before the restart may still be filling.

        Deletes the records of writers that are gone.
        """
        waiting = []
        for rows in ReservedRows.load(self._db, uid):
            if self._process_watch.is_gone(rows.lock_name):
                self._db.delete("pending", rows.key)
            else:
                waiting.append(rows)
        return waiting

    def find_overwritten(self, uid: str, spec: Spec) -> NDArray[np.int64]:
        """Returns live rows with a recorded overwrite that has not finished.

        Their generation is odd, but no writer may take them.
        """
        content = self._db.get("pending", JOURNAL + uid.encode())
        found = [] if content is None else [Journal.from_bytes(content).selection.compute_row_set(spec.batch_size)]
        found += [overwrite.rows for overwrite in Overwrite.load(self._db, uid)]
        return reduce(or_, found, RowSet.run(0, 0)).rows

    def restore(self, store: OpenedStore, reserved: Sequence[ReservedRows] = ()) -> Sequence[Reservation]:
        """Resumes, after a restart, the wait for the writers of a store; returns what else its table has quarantined.

        Args:
            store: The store, just opened.
            reserved: Reserved rows of a replay table, in the order in which the table has quarantined them.
        """
        self._restore_lost(store)
        quarantined = store.table.ring.quarantined if store.table is not None else ()
        for rows, reservation in zip(reserved, quarantined, strict=False):
            self._process_watch.watch(rows.lock_name, partial(self._release, store, reservation, rows))
        return quarantined[len(reserved) :]

    def note_left(self, store: OpenedStore, txn: Transaction, departure: Departure | None) -> None:
        """Records that rows have left a table while a local client was overwriting them, or are about to: after a
        restart they do not come back, and are not given to others until the client is gone.

        Args:
            departure: Those that leave once the transaction is committed; None: no others.
        """
        if store.table is None or not (store.writes or store.lost):
            return
        for overwrite in Overwrite.load(self._db, store.record.uid):
            kept = store.table.ring.select_held(overwrite.rows)
            if departure is not None and departure.is_final:
                kept -= departure.rows
            gone = overwrite.rows - kept
            if not gone:
                continue
            key = overwrite.select_left(gone).key
            txn.put("pending", key, (RowSet.decode(txn.get("pending", key) or b"") | gone).encode())
            if kept:
                txn.put("pending", overwrite.key, replace(overwrite, rows=kept).record)
            else:
                txn.delete("pending", overwrite.key)

    def forget(self, uid: str, txn: Transaction) -> None:
        """Deletes all records of a store that is being deleted."""
        claims = ClaimRecord.list_keys(self._db, uid)
        for key in (*claims, *ReservedRows.list_keys(self._db, uid), *Overwrite.list_keys(self._db, uid)):
            txn.delete("pending", key)

    def on_open(self) -> None:
        """Starts the grace of the stores opened so far: clients can now open sessions and repeat what was cut short."""
        healing, self._awaiting_sessions = self._awaiting_sessions or [], None
        for store in healing:
            self._begin_grace(store)

    def _begin_grace(self, store: OpenedStore) -> None:
        """Starts the grace of a store's lost rows.

        A writer from before the restart can come back from now on, or has released its lock and comes back soon.
        """
        if self._awaiting_sessions is not None:
            store.lost.rewrite_grace_until_s = math.inf
            self._awaiting_sessions.append(store)
        else:
            store.lost.rewrite_grace_until_s = time.monotonic() + RETRY_GRACE_S
            store.waiters.wake()

    def _restore_lost(self, store: OpenedStore) -> None:
        """Marks rows that are still odd as lost, except those of a write that was complete when the crash came."""
        values = store.get_generation_values()
        for overwrite in Overwrite.load(self._db, store.record.uid):
            rows = overwrite.rows.rows
            odd = RowSet.from_rows(rows[values[rows] & 1 == 1])
            if overwrite.is_committed(self._db):
                self._complete(store, replace(overwrite, rows=odd))
            elif len(odd):
                self._begin_grace(store)
                self.lose(store, replace(overwrite, rows=odd))
            else:
                self._db.delete("pending", overwrite.key)
        uid = store.record.uid
        is_in_midst = any(self._db.get("pending", key) for key in (JOURNAL + uid.encode(), Restructured.make_key(uid)))
        if store.table is None and values[-1] & 1 and not store.lost and not is_in_midst:
            values[-1] += 1  # a crash came between the rows and the store's own number

    def _complete(self, store: OpenedStore, overwrite: Overwrite) -> None:
        """Makes the rows of a write readable that is recorded as complete."""
        if len(overwrite.rows):
            run_without_turns(RowWriteHold(store, overwrite.rows, overwrite.keys).let_go(is_written=True))
        self._db.delete_later("pending", overwrite.key)

    def _release(self, store: OpenedStore, reservation: Reservation, record: ReservedRows) -> None:
        """Frees reserved rows for the next writer."""
        store.get_table().ring.release(reservation)
        self._db.delete("pending", record.key)
        store.waiters.wake()

    def _let_go(self, store: OpenedStore, overwrite: Overwrite) -> None:
        """Handles the proof that the writer of lost rows is gone.

        A table's rows go to the next writer, after the grace. Those of a tensordict store stay lost until they are
        written again.
        """
        if store.lost.rewrite_grace_until_s > -math.inf:
            self._begin_grace(store)
        self._drop_after_grace(store, overwrite)
        store.waiters.wake()

    def _drop_after_grace(self, store: OpenedStore, overwrite: Overwrite) -> None:
        """Removes the lost rows of an overwrite from their table, unless they are written again in time. Those that
        only lack what was being written stay. From a table at rest nothing is removed before its seal ends."""
        lost = next((each for each in store.lost.overwrites if each.key == overwrite.key), None)
        if store.table is None or lost is None or store.waiters.is_gone:
            return
        if store.waiters.is_at_rest:
            store.waiters.defer(partial(self._drop_after_grace, store, overwrite))
            return
        left_s = min(store.lost.rewrite_grace_until_s - time.monotonic(), RETRY_GRACE_S)
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._drop_after_grace, store, overwrite)
            return
        if any(lost.rows.has_overlap(others) for others in store.writes):  # another write has them
            self._process_watch.watch(lost.lock_name, partial(self._let_go, store, lost))
            return
        dropping = self._drop(store, lost)
        if len(lost.rows) <= store.table.state.step_rows:
            run_without_turns(dropping)
        else:
            task = asyncio.create_task(dropping, name=f"tdserve-dropping-{store.name}")
            self._dropping[task] = store.record.uid
            task.add_done_callback(self._dropping.pop)
            task.add_done_callback(retrieve_exception)

    async def _drop(self, store: OpenedStore, lost: Overwrite) -> None:
        intact = _select_intact(store, lost)
        changes = store.lost.replace_written(intact, ()) if intact else {}

        def record_intact() -> None:
            with self._db.begin_transaction(is_decided=True) as txn:
                txn.update("pending", changes)

        def forget() -> None:
            with self._db.begin_transaction(is_decided=True) as txn:
                lost.forget(txn)

        if intact:
            await RowWriteHold(store, intact, ()).let_go(is_written=False, then=record_intact)
        await RowWriteHold(store, lost.rows - intact, ()).drop(forget)
        store.waiters.wake()


def _select_intact(store: OpenedStore, lost: Overwrite) -> RowSet:
    """Selects the lost rows of a table that had none of the leaves that were being written: they are as they were
    before, and still lack these. After a loss of power nothing is known of the other leaves."""
    nothing = RowSet.run(0, 0)
    if lost.lock_name == POWER_LOSS:
        return nothing
    try:
        numbers = [store.find_numbers(path) for path in lost.keys]
    except KeyNotFoundError:  # it was removed since
        return nothing
    if not numbers or not all(numbers):
        return nothing
    others = [each.rows for each in store.lost.overwrites if each.key != lost.key]
    rows = reduce(sub, others, lost.rows).rows
    return RowSet.from_rows(rows[store.get_table().selectors.lack_all(rows, [*chain(*numbers)])])
