"""Leaves that a table's rules need: the process that fills the rows reports their bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, NotSupportedError
from tdserve.messages.row_numbers import PIECE_ROWS, TREE_PIECE_ROWS, Rows, encode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.table import Table
from tdserve.server.kinds.table_kind import LONG_ROWS
from tdserve.server.mutations.row_write_hold import wait_for_others
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import MAX_REPORTED_BYTES
from tdserve.structure.trees.tree import Path
from tdserve.v1 import worker_pb2
from tdserve.values.value_columns import decode_block

Buffer = bytes | NDArray[np.uint8]

_ID_BYTES = 8

CLAIMS_TIMEOUT_S = 30.0
"""Longest wait for writes of others: they take the time of a copy, and the session of a stopped writer ends."""


class RuleKeys:
    """Groups rows by a leaf once a sample first asks for that, and from then on."""

    async def learn_group(self, store: OpenedStore, path: Path, session: ClientSession) -> str:
        """Returns the name of the column that groups rows by a leaf; fills it for all existing rows.

        Raises:
            KeyNotFoundError: The table has no such leaf.
            NotSupportedError: A row has several values there.
        """
        column = name_group_column(path)
        if path in store.known_groups:
            return column
        if path not in dict((*store.spec.tensors, *store.spec.values)):
            raise KeyNotFoundError(store=store.name, key=".".join(path))
        async with store.write_lock:  # one at a time, and no row is half written meanwhile
            if path not in store.known_groups:
                await self._look_at_rows(store, path, session)
        return column

    async def _look_at_rows(self, store: OpenedStore, path: Path, session: ClientSession) -> None:
        """Fills the column of a leaf, a piece at a time. Rows that are committed meanwhile bring their own entry; an
        entry read from a row that was replaced since is dropped."""
        name = name_group_column(path)
        if store.record.capacity >= LONG_ROWS:
            await asyncio.to_thread(store.get_table().columns.get_array, name, np.int64)
        table = await _end_claims(store, session)
        store.group_keys.append(path)  # rows that are committed from here on bring it, and none is claimed
        try:
            # Writes to the leaf are refused by now; those that began earlier must end. That includes rows of a sample
            # that may fail and bring them back.
            num_used = table.ring.num_used
            await wait_for_others(session, store, RowSet.run(0, num_used), Deadline.after(CLAIMS_TIMEOUT_S))
            column = table.columns.get_array(name, np.int64)
            for part in _iter_parts(store, path, num_used):
                rows = table.ring.list_piece(part)
                if not len(rows):
                    continue
                row_ids = table.ring.get_row_ids(rows)
                ids = await self.read_ids(store, path, rows, session)
                store.check_present()
                is_same = table.ring.get_row_ids(rows) == row_ids
                column[rows[is_same]] = ids[is_same]
        except BaseException:
            store.group_keys.remove(path)
            raise
        store.known_groups.add(path)

    async def read_columns(
        self, store: OpenedStore, paths: Sequence[Path], rows: Rows, session: ClientSession
    ) -> dict[Path, NDArray[np.uint8]]:
        """Returns the bytes of tensor leaves of filled rows, of very many a part at a time."""
        found = {}
        for path in paths:
            num_each = store.spec.tensors_by_path[path].nbytes // store.record.capacity
            column = found[path] = np.empty(len(rows) * num_each, np.uint8)
            for part in _iter_parts(store, path, len(rows)):
                content = await self.read(store, path, rows[part], session)
                column[part.start * num_each : part.stop * num_each] = np.frombuffer(content, np.uint8)
        return found

    async def read_ids(self, store: OpenedStore, path: Path, rows: Rows, session: ClientSession) -> NDArray[np.int64]:
        """Returns a number per row by which rows are grouped; reads very many rows in parts."""
        as_numbers = to_ids if path in store.spec.tensors_by_path else partial(_make_value_ids, path)
        ids = np.empty(len(rows), np.int64)
        for part in _iter_parts(store, path, len(rows)):
            content = await self.read(store, path, rows[part], session)
            ids[part] = as_numbers(content, part.stop - part.start)
        return ids

    async def measure(self, store: OpenedStore, path: Path, rows: Rows, session: ClientSession) -> NDArray[np.int64]:
        """Returns the size of a leaf in each of these rows: the sum of a tensor's elements, the bytes of its values.

        Raises:
            NotSupportedError: It has numbers that are not integers.
        """
        sizes = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), TREE_PIECE_ROWS):
            part = slice(start, start + TREE_PIECE_ROWS)
            sizes[part] = np.frombuffer(await _ask_worker(store, path, rows[part], session, measures=True), np.int64)
        return sizes

    async def read(self, store: OpenedStore, path: Path, rows: Rows, session: ClientSession) -> bytes:
        """Returns the bytes of a leaf of filled rows."""
        return await _ask_worker(store, path, rows, session)


async def _ask_worker(
    store: OpenedStore, path: Path, rows: Rows, session: ClientSession, *, measures: bool = False
) -> bytes:
    order = worker_pb2.Order()
    order.read_columns.store.CopyFrom(store.make_ref(session.worker.known_specs))
    order.read_columns.rows = encode_rows(rows)
    order.read_columns.keys.add(parts=path)
    order.read_columns.measures = measures
    worked = await session.worker.submit(order)
    return worked.columns[0]


def _iter_parts(store: OpenedStore, path: Path, num_rows: int) -> Iterator[slice]:
    """Yields the parts of rows that are read by one order: fewer rows of long leaves, which are digested one by one."""
    leaf = store.spec.tensors_by_path.get(path)
    num_each = _ID_BYTES + 1 if leaf is None else max(leaf.nbytes // store.record.capacity, 1)
    most = PIECE_ROWS if num_each <= _ID_BYTES else TREE_PIECE_ROWS
    num_read = max(min(most, MAX_REPORTED_BYTES // num_each), 1)
    for start in range(0, num_rows, num_read):
        yield slice(start, min(start + num_read, num_rows))


async def _end_claims(store: OpenedStore, session: ClientSession) -> Table:
    """Returns the table once no writer has a claim: claimed rows bring no entry for a group."""
    deadline = Deadline.after(CLAIMS_TIMEOUT_S)
    while (table := store.get_table()).claims:
        table.state.take_back_claims()
        await session.wait_until(
            store.waiters,
            lambda: not store.get_table().claims,
            deadline,
            lambda: f"a writer that is filling rows of {store.name!r}",
        )
    return table


def _make_value_ids(path: Path, content: bytes, num_rows: int) -> NDArray[np.int64]:
    ((per_row, values),) = decode_block(content)
    digests = [_compute_digest(value) for value in values]
    if not per_row:
        digests *= num_rows
    if len(digests) != num_rows:
        raise NotSupportedError(feature=f"group_by={path!r}", reason="a row has several values there")
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def _compute_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_ID_BYTES).digest()


def name_group_column(path: Path) -> str:
    """Returns the name of the column that groups rows by a leaf."""
    return "group-" + _compute_digest(repr(path).encode("utf-8", "surrogatepass")).hex()


def to_bools(content: Buffer, num_rows: int) -> NDArray[np.bool_]:
    """Returns which rows have a byte that is not zero."""
    return np.asarray(np.frombuffer(content, np.uint8).reshape(num_rows, -1).any(axis=1))


def to_ids(content: Buffer, num_rows: int) -> NDArray[np.int64]:
    """Returns a number per row: equal for equal bytes, and hardly ever otherwise."""
    table = np.frombuffer(content, np.uint8).reshape(num_rows, len(content) // max(num_rows, 1))
    if table.shape[1] <= _ID_BYTES:
        padded = np.zeros((num_rows, _ID_BYTES), np.uint8)
        padded[:, : table.shape[1]] = table
        return padded.view("<i8").reshape(num_rows)
    digests = b"".join(_compute_digest(row.tobytes()) for row in table)
    return np.frombuffer(digests, "<i8").astype(np.int64)
