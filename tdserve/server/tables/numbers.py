"""Finds the rows of a table that an index means, a piece at a time: a table may have very many rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
from google.protobuf.message import Message

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, RUN_PIECE_ROWS, Rows, encode_repeats, encode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.items import is_mask
from tdserve.messages.selection.selection import Selection
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.execution.turns import run_in_turns

_EMPTY = RowSet.run(0, 0)

_FOUND_ROWS = 2 * PIECE_ROWS
"""Row numbers that are checked in one turn, where those of live rows are collected."""

_READ_ROWS = PIECE_ROWS // 4
"""Rows, scattered over a table, that are read in one turn; a millisecond, since each needs a fetch from memory."""


async def compute_row_numbers(selection: Selection, table: TableState, *, lost: RowSet = _EMPTY) -> Rows:
    """Returns the row numbers that an index means: integers are row numbers, slices and masks choose among the live
    rows.

    Negative positions count from behind the last live row, so that ``[-1]`` is the live row with the highest number.
    ``lost`` rows count as gone, unless an integer names them. Rows may come and go meanwhile: each row is live when it
    is checked.

    Raises:
        SelectionError: The index does not fit, or has more than one dimension.
    """
    num_numbers = table.ring.num_used
    if _is_last_row_needed(selection):
        found: list[int] = []
        await run_in_turns(_find_last_live(table, found))
        num_numbers = found[0] + 1
    canonical = selection.canonicalise((num_numbers,), store=table.name)
    item = slice(None) if canonical.is_everything else canonical.items[0]
    if len(canonical.items) > 1 or item is None or item is Ellipsis:
        raise SelectionError(
            selection=repr(selection), reason=f"rows of {table.name!r} have one dimension to choose from"
        )
    if isinstance(item, int):
        return np.array([item], np.int64)
    if isinstance(item, np.ndarray) and not is_mask(item):
        return item.reshape(-1).astype(np.int64)
    pieces: list[Rows] = []
    await run_in_turns(_find_live(table, item, num_numbers, lost, pieces))
    return _join(pieces) if sum(map(len, pieces)) <= PIECE_ROWS else await asyncio.to_thread(_join, pieces)


async def plan_read(table: Table, rows: Rows) -> RowsPlan:
    """Like ``Table.plan_read``, a piece at a time: each row is live, and has its generation, when it is visited. As
    with every plan, a reader notices that a row has changed since."""
    if len(rows) <= _READ_ROWS:
        return table.plan_read(rows)
    generations = np.empty(len(rows), np.int64)

    def look() -> Iterator[None]:
        for begin in range(0, len(rows), _READ_ROWS):
            part = slice(begin, begin + _READ_ROWS)
            generations[part] = table.plan_read(rows[part]).generations
            yield

    await run_in_turns(look())
    return RowsPlan(rows, generations, {})


def _join(pieces: list[Rows]) -> Rows:
    """Returns all rows in one array, and empties ``pieces``: freeing their memory takes long as well."""
    joined = np.concatenate([NO_ROWS, *pieces])
    pieces.clear()
    return joined


def _is_last_row_needed(selection: Selection) -> bool:
    """Returns whether an index counts from the end or is a mask; the meaning of others does not depend on the number
    of rows."""
    for item in selection.items:
        if is_mask(item):
            return True
        if isinstance(item, int):
            return item < 0
        if isinstance(item, slice):
            step = 1 if item.step is None else item.step
            return step < -1 or (item.start or 0) < 0 or (item.stop or 0) < 0
        if isinstance(item, np.ndarray):
            return bool(item.size) and int(item.min()) < 0
    return False


def _find_last_live(table: TableState, found: list[int]) -> Iterator[None]:
    """Puts the number of the last live row into ``found``, or -1 if there is none."""
    for end in range(table.ring.num_used, 0, -RUN_PIECE_ROWS):
        begin = max(end - RUN_PIECE_ROWS, 0)
        live = np.flatnonzero(table.is_live(slice(begin, end)))
        if len(live):
            found.append(begin + int(live[-1]))
            return
        yield
    found.append(-1)


def _find_live(table: TableState, item: object, num_numbers: int, lost: RowSet, pieces: list[Rows]) -> Iterator[None]:
    """Puts the live rows that a slice or mask selects into ``pieces``, in its order."""
    chosen = range(*item.indices(num_numbers)) if isinstance(item, slice) else range(num_numbers)
    for begin in range(0, len(chosen), _FOUND_ROWS):
        part = chosen[begin : begin + _FOUND_ROWS]
        rows = np.arange(part.start, part.stop, part.step)
        is_meant = table.is_live(rows)
        if isinstance(item, np.ndarray):
            is_meant &= item[part.start : part.stop]
        if lost:
            is_meant &= ~lost.contains(rows)
        pieces.append(rows[is_meant])
        if begin + _FOUND_ROWS < len(chosen):
            yield


def encode_plan(plan: RowsPlan) -> tuple[bytes, bytes]:
    """Returns the numbers and generations of rows, encoded for a message. For very many rows, call it in a thread."""
    if len(plan.rows) <= PIECE_ROWS:
        return encode_rows(plan.rows), plan.generations.tobytes()
    return encode_rows(plan.rows), encode_repeats(plan.generations)


async def encode_apart(plan: RowsPlan, make: Callable[[RowsPlan], Message]) -> bytes:
    """Returns the part of a message that names very many rows, made and serialised in a thread; nothing for few."""
    return await asyncio.to_thread(lambda: make(plan).SerializeToString()) if len(plan.rows) > PIECE_ROWS else b""
