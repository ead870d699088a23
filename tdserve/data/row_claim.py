"""Claimed rows: their writer fills and commits them through its claim file, without waiting for control.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np

from tdserve.base.failpoints import reach
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.places import Places
from tdserve.messages.row_numbers import Rows
from tdserve.store.rows.claim_file import ClaimedRows, ClaimFile
from tdserve.v1 import control_pb2


class RowClaim:
    """A claim, from control's grant to its end. Threads: safe, one extend at a time.

    Args:
        store: The table.
        path: The claim file.
        claim: Control's grant.
        notify: Sends a message to control, under the claim's lock.

    Attributes:
        num_extends: Extends that have used it.
        is_exhausted: Whether it ended because control had not yet committed what was claimed before.

    Raises:
        TDServeError: This process cannot use it: the file is gone, or the store may not be written.
    """

    def __init__(
        self, store: MappedStore, path: Path, claim: control_pb2.Claim, *, notify: Callable[[control_pb2.Claimed], None]
    ) -> None:
        self._store = store
        self._generations, self._shared = store.map_writable_generations(), store.writable_shared
        self._is_sole = claim.is_sole
        self._file = ClaimFile.open(path)
        self._first_row = claim.first_row
        self._capacity = store.spec.batch_size[0]
        self._claimed = control_pb2.Claimed(uid=claim.uid, num=claim.num)
        self._notify = notify
        self._lock = Lock()
        self._is_over = False
        self._num_filled = 0
        self.num_extends = 0
        self.is_exhausted = False

    def may_claim(self, num_rows: int) -> bool:
        """Returns whether an extend by this many rows would find room now."""
        return not self._is_over and self._store.is_current and self._file.may_claim(num_rows)

    def extend(self, filled: ClaimedRows, fill: Callable[[Rows, Places], None]) -> Rows | None:
        """Writes rows, and returns their numbers. None if control must be asked for rows, and then the claim is over.

        Args:
            filled: The extend.
            fill: Fills the rows of these numbers, at these places.

        Raises:
            TDServeError: As raised by ``fill``, and the rows are not stored; or by ``notify``, and they are. The claim
                is over.
        """
        num_rows = filled.num_rows
        with self._lock:
            first = self._take(num_rows)
            if first is None:
                return None
            begin = (self._first_row + first) % self._capacity
            rows = np.arange(begin, begin + num_rows)
            places = Places(begin)
            if begin + num_rows > self._capacity:
                rows %= self._capacity
                places = Places(rows=rows)
            try:
                where = places.get_part(0, num_rows)
                before = self._generations[where].copy()
                hidden = self._generations[where] = before | 1
                reach("claim.taken")
                self._file.fence()  # a long copy may bypass the order of stores
                fill(rows, places)
                reach("claim.filled")
                is_awaited = self._file.write(filled)
                reach("claim.written")
                if self._is_sole:
                    self._store.uncommitted.mark_filled(self._shared, rows, before, hidden)
                else:
                    self._shared.mark_filled()
            except BaseException:
                self._abandon()
                raise
            self._num_filled += num_rows
            self.num_extends += 1
            if is_awaited:
                self._report()
        return rows

    def close(self) -> None:
        """Waits until no row is being filled, and lets none be filled any more."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        """Ends the claim, under the lock. Whether its rows are stored may be decided by a retry from now on."""
        self._is_over = True
        self._store.uncommitted.forget()

    def _report(self) -> None:
        """Reports the record, under the lock: a lost session leaves at most one extend without an answer."""
        try:
            self._notify(self._claimed)
        except BaseException:
            self._end()
            raise

    def _take(self, num_rows: int) -> int | None:
        """Claims rows; None if that is not possible, and then the claim is over."""
        if self._is_over:
            return None
        first = self._file.claim(num_rows) if self._store.is_current else None
        if first is not None and first != self._num_filled:  # LOST, or rows that an interrupted call has claimed
            self._abandon()
            return None
        if first is None:
            self._is_over = True
            self.is_exhausted = not self._file.is_over
        return first

    def _abandon(self) -> None:
        """Abandons the last claimed rows, which are not filled and never will be."""
        self._end()
        self._claimed.abandons = True
        self._notify(self._claimed)
