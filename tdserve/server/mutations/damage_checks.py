"""Comparisons of rows with their checksums, before the server does what would make a damaged row seem whole.

A checksum is of all leaves of a row. Once some of them are written, or the keys of the store have changed, the next
sync sums up what is there then. So a row that is damaged has to be found before that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.content import decode_paths
from tdserve.messages.row_numbers import encode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.items import is_mask
from tdserve.messages.selection.selection import from_message
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2, worker_pb2

_BYTES_AT_ONCE = 64 << 20
"""Content that one order compares: the worker has other orders too."""


class DamageChecks:
    """Compares rows of stores that were created with ``checksum=True``; of other stores it compares nothing.

    Args:
        worker: The worker that compares.
    """

    def __init__(self, worker: DataWorker) -> None:
        self._worker = worker

    async def check_write(self, store: OpenedStore, rows: RowSet, asked: control_pb2.WriteRequest) -> None:
        """Compares the rows of a write, which no other may write at the same time, unless it replaces them whole.

        Raises:
            DamagedRowError: One is damaged.
        """
        if store.record.checksum and not _is_replacing_rows(store.spec, asked):
            await self._compare(store, rows)

    async def check_all(self, store: OpenedStore) -> None:
        """Compares all rows.

        Raises:
            DamagedRowError: One is damaged.
        """
        if store.record.checksum:
            await self._compare(store, RowSet.run(0, store.spec.num_rows))

    async def _compare(self, store: OpenedStore, rows: RowSet) -> None:
        row_nbytes = store.spec.nbytes // max(store.spec.num_rows, 1)
        for numbers in _iter_numbers(rows, max(1, _BYTES_AT_ONCE // max(row_nbytes, 1))):
            order = worker_pb2.Order()
            order.read_columns.rows = numbers
            order.read_columns.compares = True
            await self._worker.order_until_done(store, order)
            store.check_current()  # it may have been deleted since


def _is_replacing_rows(spec: Spec, asked: control_pb2.WriteRequest) -> bool:
    """Returns whether a write certainly replaces all content of each of its rows."""
    keys = decode_paths(asked.keys)
    paths = [path for path, _ in (*spec.tensors, *spec.values)]
    if keys and not all(any(path[: len(key)] == key for key in keys) for path in paths):
        return False
    items = from_message(asked.selection).items
    if len(spec.batch_size) <= 1 or not items:
        return True
    return len(items) == 1 and not (is_mask(items[0]) and items[0].ndim > 1)


def _iter_numbers(rows: RowSet, num_rows: int) -> Iterator[bytes]:
    """Yields rows as bytes, at most this many at once."""
    for piece in rows.iter_pieces():
        if isinstance(piece, slice):
            for start in range(piece.start, piece.stop, num_rows):
                yield RowSet.run(start, min(start + num_rows, piece.stop)).encode()
        else:
            listed: NDArray[np.int64] = piece
            for first in range(0, len(listed), num_rows):
                yield encode_rows(listed[first : first + num_rows])
