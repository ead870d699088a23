"""Disk space for the catalog, reserved before it is needed: recording a decision must not fail for lack of space.

The entries of a keyed store have such a reserve too, so that some can be removed when the disk is full.

LMDB copies each page that a transaction changes, so even a deletion takes free pages. The data file is therefore grown
ahead of its use, and the last part of it is a reserve: a change that may still be refused does not use it, and a change
that others already rely on may.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lmdb

from tdserve.base.errors import CapacityError
from tdserve.store.disk.faults import free_bytes

RESERVE_BYTES = 1 << 20
"""Room for some 20 transactions that change a handful of records each, even if no page can be reused."""

STEP_BYTES = 1 << 20
"""Step by which the file grows. tmpfs takes 0.4 ms for it."""

_NUM_PAGES_PER_CHANGE = 8
"""Pages that one change may copy: the path from the root of a table to a leaf, and pages that are split."""

_NUM_PAGES_PER_TRANSACTION = 16
"""Pages for the tables' roots and LMDB's list of free pages."""


class CatalogRoom:
    """Grows the data file of an LMDB environment, which this process alone writes.

    Args:
        path: The data file.
        env: The environment.
        tables: All its tables.
        max_bytes: Size of the map.
        what: Names it in errors.
    """

    def __init__(
        self, path: Path, env: lmdb.Environment, tables: Collection[Any], *, max_bytes: int, what: str = "the catalog"
    ) -> None:
        self._what = what
        self._path = path
        self._env = env
        self._tables = tables
        self._max_bytes = max_bytes
        self._page_nbytes: int = env.stat()["psize"]
        self._reserve_bytes = min(RESERVE_BYTES, max_bytes // 4)
        self._allocated_bytes = 0
        self._tail_bytes = 0  # at least so much is allocated behind the last page in use
        if not self._grow(self._end_bytes() + self._reserve_bytes):
            self._grow(os.path.getsize(path))  # already allocated, unless it is a copy with holes
        self._measure_tail()

    def take(self, num_changes: int, nbytes: int, *, uses_reserve: bool = False) -> None:
        """Ensures room for a transaction; call it before the transaction.

        Args:
            num_changes: Records that it puts or deletes.
            nbytes: Length of all values that it puts.
            uses_reserve: Whether it may use the reserve.

        Raises:
            CapacityError: There is none. Nothing was changed.
        """
        num_pages = _NUM_PAGES_PER_CHANGE * num_changes + _NUM_PAGES_PER_TRANSACTION
        needed_bytes = nbytes + num_pages * self._page_nbytes
        kept_bytes = 0 if uses_reserve else self._reserve_bytes
        if self._tail_bytes - needed_bytes < kept_bytes:
            self._make_room(needed_bytes, kept_bytes, nbytes)
        self._tail_bytes -= needed_bytes

    def _make_room(self, needed_bytes: int, kept_bytes: int, nbytes: int) -> None:
        self._measure_tail()
        wanted_bytes = needed_bytes + kept_bytes
        if self._tail_bytes >= wanted_bytes:
            return
        if self._grow(self._end_bytes() + wanted_bytes):
            self._measure_tail()
            return
        # Deleted records left scattered single pages, which are no place for a value larger than a page.
        unused_bytes = self._tail_bytes + self._end_bytes() - self._compute_used_bytes()
        usable_bytes = unused_bytes if nbytes <= self._page_nbytes else self._tail_bytes
        if usable_bytes < wanted_bytes:
            raise self._make_full_error(nbytes, wanted_bytes, max(usable_bytes - kept_bytes, 0))

    def _make_full_error(self, nbytes: int, wanted_bytes: int, usable_bytes: int) -> CapacityError:
        """Returns the error for ``nbytes`` of values.

        Args:
            nbytes: Length of the values.
            wanted_bytes: What has to be free behind the last page in use: for values, copied pages and the reserve.
            usable_bytes: What is unused in the file, without the reserve.
        """
        end_bytes = self._end_bytes() + wanted_bytes
        if end_bytes > self._max_bytes:
            reason = f"it has reached its limit of {self._max_bytes} bytes"
            return CapacityError(what=f"{self._what} {self._path}: {reason}", asked=nbytes, free=usable_bytes)
        free = free_bytes(self._path)
        missing_bytes = end_bytes - self._allocated_bytes
        reason = f"its disk is full ({free} bytes are free there), and the file must grow by {missing_bytes} bytes"
        return CapacityError(what=f"{self._what} {self._path}: {reason}", asked=nbytes, free=free)

    def _grow(self, nbytes: int) -> bool:
        """Allocates the file up to ``nbytes``, and a step more if there is room; returns whether it has ``nbytes``."""
        for size in (nbytes + STEP_BYTES, nbytes):
            size = min(-(-size // self._page_nbytes) * self._page_nbytes, self._max_bytes)
            if nbytes <= size <= self._allocated_bytes:
                return True
            if nbytes <= size and self._allocate(size):
                self._allocated_bytes = size
                return True
        return False

    def _allocate(self, size: int) -> bool:
        if size - self._allocated_bytes > free_bytes(self._path) and size > os.path.getsize(self._path):
            return False  # known at once; an attempt takes a millisecond
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, self._allocated_bytes, size - self._allocated_bytes)
            finally:
                os.close(fd)
        except OSError:
            return False
        return True

    def _measure_tail(self) -> None:
        self._tail_bytes = self._allocated_bytes - self._end_bytes()

    def _end_bytes(self) -> int:
        """Returns the end of the last page in use."""
        last_page: int = self._env.info()["last_pgno"]
        return (last_page + 1) * self._page_nbytes

    def _compute_used_bytes(self) -> int:
        """Returns the size of the pages that have records."""
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(table) for table in self._tables)]
        return sum(map(count_page_bytes, stats))


def count_page_bytes(stat: Any) -> int:
    """Returns the size of the pages that have the records of an LMDB table, from its statistics."""
    nbytes: int = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
    return nbytes
