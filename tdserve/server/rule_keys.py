"""Leaves that a table's rules look at: their bytes are reported by the worker that received the rows."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import KeyNotFoundError, NotSupportedError
from tdserve.row_numbers import encode_rows
from tdserve.server.entry import Entry
from tdserve.server.session import ClientSession
from tdserve.spec.tree import Path
from tdserve.v1 import worker_pb2

_ID_BYTES = 8


class RuleKeys:
    """Learns by what rows are grouped when somebody first asks for groups, and keeps it up from then on."""

    async def learn_group(self, entry: Entry, path: Path, session: ClientSession) -> str:
        """The name of the column that groups rows by a leaf; filled for all rows that are there.

        Raises:
            KeyNotFoundError: Rows have no such leaf.
            NotSupportedError: The leaf is no tensor.
        """
        column = group_column(path)
        if path in entry.group_keys:
            return column
        if path not in dict(entry.spec.tensors):
            if path in dict(entry.spec.values):
                raise NotSupportedError(feature=f"group_by={path!r}", reason="rows are grouped by tensors")
            raise KeyNotFoundError(store=entry.name, key=".".join(path))
        table = entry.replay_table()
        entry.group_keys.append(path)  # rows that are committed from here on bring it themselves
        rows = table.live_rows()
        before = entry.generation_values()[rows]
        try:
            ids = as_ids(await self.read(entry, path, rows, session), len(rows))
        except BaseException:
            entry.group_keys.remove(path)
            raise
        is_same = entry.generation_values()[rows] == before
        table.columns.array(column, np.int64)[rows[is_same]] = ids[is_same]
        return column

    async def read(self, entry: Entry, path: Path, rows: NDArray[np.int64], session: ClientSession) -> bytes:
        """The bytes of a leaf of rows whose content is in its place."""
        order = worker_pb2.Order()
        order.read_columns.store.CopyFrom(entry.ref(session.worker.known_specs))
        order.read_columns.rows = encode_rows(rows)
        order.read_columns.keys.add(parts=path)
        worked = await session.worker.order(order)
        return worked.columns[0]


def group_column(path: Path) -> str:
    """Name of the column that holds what rows are grouped by."""
    return "group-" + hashlib.blake2b(repr(path).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def as_bools(content: bytes, num_rows: int) -> NDArray[np.bool_]:
    """Which rows have a byte that is not zero."""
    return np.asarray(np.frombuffer(content, np.uint8).reshape(num_rows, -1).any(axis=1))


def as_ids(content: bytes, num_rows: int) -> NDArray[np.int64]:
    """A number per row: equal where the rows' bytes are equal, and hardly ever otherwise."""
    table = np.frombuffer(content, np.uint8).reshape(num_rows, -1)
    if table.shape[1] <= _ID_BYTES:
        padded = np.zeros((num_rows, _ID_BYTES), np.uint8)
        padded[:, : table.shape[1]] = table
        return padded.view("<i8").reshape(num_rows)
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=_ID_BYTES).digest() for row in table)
    return np.frombuffer(digests, "<i8").astype(np.int64)
