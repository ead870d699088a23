"""Claimed rows: a local client fills them and commits them through its claim file, without waiting for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_writes import Places, fill_rows
from tdserve.data.opened import MappedStore
from tdserve.store.claim_file import ClaimFile
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2


class RowClaim:
    """A claim, from the server's grant to its end. Threads: safe, one extend at a time.

    Args:
        local: The session's local end.
        name: Name of the table.
        stored: Its whole structure.
        claim: The server's grant.

    Attributes:
        num_extends: Extends that have used it.
        is_exhausted: Whether it ended because the server had not yet committed what was claimed before.

    Raises:
        TDServeError: This process cannot use it: the store is gone or may not be written, or the session is over.
    """

    def __init__(self, local: LocalEnd, name: str, stored: Spec, claim: control_pb2.Claim) -> None:
        self._local = local
        self._said = control_pb2.Claimed(uid=claim.uid, num=claim.num)
        self._first_row = claim.first_row
        self._store: MappedStore = local.store(name, claim.uid, stored, structure=claim.structure)
        self._generations, self._shared = self._store.map_writable_generations(), self._store.writable_shared
        self._file = ClaimFile.open(local.root / claim.path)
        self._capacity = stored.batch_size[0]
        self._bell = control_pb2.ClientMessage(claimed=self._said)
        self._lock = Lock()
        self._is_over = False
        self._num_filled = 0
        self.num_extends = 0
        self.is_exhausted = False
        local.keep(self)

    def extend(self, request: int, captured: Sequence[Captured]) -> NDArray[np.int64] | None:
        """Writes rows, and returns their numbers.

        None if the server must be asked for rows, and then the claim is over.

        Args:
            request: Number of this request, which a retry uses too.
            captured: Their content, in order.

        Raises:
            ConnectError: The session is lost. A retry finds out whether the rows are stored.
        """
        num_rows = sum(each.spec.batch_size[0] for each in captured)
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
                self._generations[places.get_part(0, num_rows)] |= 1
                self._file.fence()  # a long copy may bypass the order of stores
                fill_rows(self._store, places, captured)
                is_awaited = self._file.write(request, num_rows)
                self._shared.mark_filled()
            except BaseException:
                self._abandon()
                raise
            self._num_filled += num_rows
            self.num_extends += 1
            if is_awaited:
                self._notify_server()
        return rows

    def _notify_server(self) -> None:
        """Messages the server, under the lock: a lost session leaves at most one extend without an answer."""
        try:
            self._local.send(self._bell)
        except TDServeError:
            self._is_over = True
            raise

    def close(self) -> None:
        """Waits until no row is being filled, and lets none be filled any more."""
        with self._lock:
            self._is_over = True

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
        self._is_over = True
        message = control_pb2.ClientMessage(claimed=self._said)
        message.claimed.abandons = True
        with suppress(TDServeError):  # the session is over, which has the same effect
            self._local.send(message)
