"""What local clients were writing when they, or the server, ended: rows that wait for the proof that they are gone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.reservation import Reservation
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.claim_records import ClaimRecord
from tdserve.server.recovery.journal import JOURNAL, Journal
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.server.recovery.process_watch import Departures
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.server.recovery.restructured import Restructured
from tdserve.server.row_write_hold import RowWriteHold
from tdserve.server.turns import at_once
from tdserve.server.waiting import hear
from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.structure.tree import Spec

RETRY_GRACE_S = 5.0
"""After a restart a writer that is still there comes back, and repeats what was cut short, before this is over: gRPC
tries to connect every 2 s at least. Counted from when it can come back, and again from when it has let go of the lock
of its session of before, which it holds for as long as it is at work; or stopped."""


class Unfinished:
    """Keeps such rows from others, also across a restart.

    Args:
        db: The catalog, in which they are on record.
        departures: Tells which processes are gone.
    """

    def __init__(self, db: CatalogDB, departures: Departures) -> None:
        self._db = db
        self._departures = departures
        self._dropping: set[asyncio.Task[None]] = set()
        self._healing: list[OpenedStore] | None = []  # whose grace begins when sessions are opened; None: they are

    def may_be_written(self, entry: OpenedStore, rows: RowSet) -> bool:
        """Whether a process that lost these rows can still write into them: one that is stopped may resume."""
        return bool(entry.lost) and not all(map(self._departures.is_gone, entry.lost.touching(rows)))

    def hold_back(self, entry: OpenedStore, reservation: Reservation, record: ReservedRows) -> None:
        """The writer of reserved rows is not here any more: they are nobody's until it is proved gone."""
        entry.replay_table().quarantine(reservation)
        self._departures.watch(record.lock_name, partial(self._release, entry, reservation, record))

    def lose(self, entry: OpenedStore, overwrite: Overwrite) -> None:
        """The writer of live rows has left them half written."""
        entry.lost.overwrites.append(overwrite)
        self._departures.watch(overwrite.lock_name, partial(self._let_go, entry, overwrite))

    def find_reserved(self, uid: str) -> list[ReservedRows]:
        """Rows of a store that local writers of before the restart may still be filling."""
        waiting = []
        for rows in ReservedRows.load(self._db, uid):
            if self._departures.is_gone(rows.lock_name):
                self._db.delete("pending", rows.key)
            else:
                waiting.append(rows)
        return waiting

    def overwritten(self, uid: str, spec: Spec) -> NDArray[np.int64]:
        """Live rows of a store whose overwriting is on record and not done: they are nobody else's, odd as they are."""
        content = self._db.get("pending", JOURNAL + uid.encode())
        found = [] if content is None else [Journal.from_bytes(content).selection.row_set(spec.batch_size)]
        found += [overwrite.rows for overwrite in Overwrite.load(self._db, uid)]
        return reduce(or_, found, RowSet.run(0, 0)).rows

    def restore(self, entry: OpenedStore, reserved: Sequence[ReservedRows] = ()) -> Sequence[Reservation]:
        """Takes up again, after a restart, what waits; returns what its table has quarantined beside that.

        Args:
            entry: The store, just opened.
            reserved: Of a replay, in the order in which its table has quarantined them.
        """
        self._restore_lost(entry)
        quarantined = entry.table.ring.quarantined if entry.table is not None else ()
        for rows, reservation in zip(reserved, quarantined, strict=False):
            self._departures.watch(rows.lock_name, partial(self._release, entry, reservation, rows))
        return quarantined[len(reserved) :]

    def note_left(self, entry: OpenedStore, txn: Transaction) -> None:
        """Rows of a table were removed: those that a local client overwrites just now do not come back after a restart,
        and are nobody's until it is gone."""
        if entry.table is None or not (entry.writes or entry.lost):
            return
        held = entry.table.ring.held_rows()
        for overwrite in Overwrite.load(self._db, entry.record.uid):
            gone, kept = overwrite.rows - held, overwrite.rows & held
            if not gone:
                continue
            key = overwrite.left(gone).key
            txn.put("pending", key, (RowSet.decode(txn.get("pending", key) or b"") | gone).encode())
            if kept:
                txn.put("pending", overwrite.key, replace(overwrite, rows=kept).record)
            else:
                txn.delete("pending", overwrite.key)

    def forget(self, uid: str, txn: Transaction) -> None:
        """The store is deleted."""
        claims = ClaimRecord.records_of(self._db, uid)
        for key in (*claims, *ReservedRows.records_of(self._db, uid), *Overwrite.records_of(self._db, uid)):
            txn.delete("pending", key)

    def on_open(self) -> None:
        """Clients may open sessions from now on, and repeat what was cut short."""
        healing, self._healing = self._healing or [], None
        for entry in healing:
            self._begin_grace(entry)

    def _begin_grace(self, entry: OpenedStore) -> None:
        """A writer of before the restart may come back from now on, or has let go of its lock: it does so soon."""
        if self._healing is not None:
            entry.lost.may_heal_until_s = math.inf
            self._healing.append(entry)
        else:
            entry.lost.may_heal_until_s = time.monotonic() + RETRY_GRACE_S
            entry.changed.wake()

    def _restore_lost(self, entry: OpenedStore) -> None:
        """Rows that are odd still are lost, but for those of a write that was whole when the crash came."""
        values = entry.generation_values()
        for overwrite in Overwrite.load(self._db, entry.record.uid):
            rows = overwrite.rows.rows
            odd = RowSet.of(rows[values[rows] & 1 == 1])
            if overwrite.is_committed(self._db):
                self._complete(entry, replace(overwrite, rows=odd))
            elif len(odd):
                self._begin_grace(entry)
                self.lose(entry, replace(overwrite, rows=odd))
            else:
                self._db.delete("pending", overwrite.key)
        uid = entry.record.uid
        is_in_midst = any(self._db.get("pending", key) for key in (JOURNAL + uid.encode(), Restructured.key_of(uid)))
        if entry.table is None and values[-1] & 1 and not entry.lost and not is_in_midst:
            values[-1] += 1  # a crash came between the rows and the store's own number

    def _complete(self, entry: OpenedStore, overwrite: Overwrite) -> None:
        """Makes the rows of a write readable that is on record as whole."""
        if len(overwrite.rows):
            at_once(RowWriteHold(entry, overwrite.rows, overwrite.keys).let_go(is_written=True))
        self._db.delete_later("pending", overwrite.key)

    def _release(self, entry: OpenedStore, reservation: Reservation, record: ReservedRows) -> None:
        """The next writer gets the rows."""
        entry.replay_table().release(reservation)
        self._db.delete("pending", record.key)
        entry.changed.wake()

    def _let_go(self, entry: OpenedStore, overwrite: Overwrite) -> None:
        """A table gives lost rows to the next writer; those of a tensordict store can be written again."""
        if entry.lost.may_heal_until_s > -math.inf:
            self._begin_grace(entry)
        lost = next((each for each in entry.lost.overwrites if each.key == overwrite.key), None)
        if entry.table is not None and lost is not None:
            if any(lost.rows.overlaps(others) for others in entry.writes):  # somebody writes them again
                self._departures.watch(lost.lock_name, partial(self._let_go, entry, lost))
                return
            dropping = self._drop(entry, lost)
            if len(lost.rows) <= entry.table.step_rows:
                at_once(dropping)
            else:
                task = asyncio.create_task(dropping, name=f"tdserve-dropping-{entry.name}")
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
                task.add_done_callback(hear)
        entry.changed.wake()

    async def _drop(self, entry: OpenedStore, lost: Overwrite) -> None:
        def forget() -> None:
            with self._db.transaction(is_decided=True) as txn:
                lost.forget(txn)

        await RowWriteHold(entry, lost.rows, ()).drop(forget)
        entry.changed.wake()
