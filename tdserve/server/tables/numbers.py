"""Which rows of a table an index means, found a few at a time: a table may have very many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import PIECE_ROWS, RUN_PIECE_ROWS, encode_repeats, encode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.items import is_mask
from tdserve.messages.selection.selection import Selection
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.turns import in_turns

Rows = NDArray[np.int64]

NONE = RowSet.run(0, 0)

NO_ROWS = np.empty(0, np.int64)

_FOUND_ROWS = 2 * PIECE_ROWS
"""Numbers that are looked at in one turn for those of live rows, which are noted."""

_READ_ROWS = PIECE_ROWS // 4
"""Rows all over a table that are looked at in one turn; a millisecond, where memory has to be fetched for each."""


async def numbers_of(selection: Selection, table: TableState, *, lost: RowSet = NONE) -> Rows:
    """Row numbers that an index means: integers are row numbers, slices and masks choose among the live rows.

    Negative positions count from behind the last live row, so that ``[-1]`` is the live row of the highest number.
    ``lost`` rows are as good as gone, unless an integer names them. While it looks, rows may come and go: each row is
    live when it is looked at.

    Raises:
        SelectionError: The index does not fit, or has more than one dimension.
    """
    num_numbers = table.ring.num_used
    if _needs_last_row(selection):
        found: list[int] = []
        await in_turns(_find_last_live(table, found))
        num_numbers = found[0] + 1
    canonical = selection.canonical((num_numbers,), store=table.name)
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
    await in_turns(_find_live(table, item, num_numbers, lost, pieces))
    return _join(pieces) if sum(map(len, pieces)) <= PIECE_ROWS else await asyncio.to_thread(_join, pieces)


async def plan_read(table: Table, rows: Rows) -> RowsPlan:
    """As ``Table.plan_read``, a piece at a time: each row is live, and has its generation, when it is looked at. Who
    copies a row that has changed since sees that it has, as with every plan."""
    if len(rows) <= _READ_ROWS:
        return table.plan_read(rows)
    generations = np.empty(len(rows), np.int64)

    def look() -> Iterator[None]:
        for begin in range(0, len(rows), _READ_ROWS):
            part = slice(begin, begin + _READ_ROWS)
            generations[part] = table.plan_read(rows[part]).generations
            yield

    await in_turns(look())
    return RowsPlan(rows, generations, {})


def _join(pieces: list[Rows]) -> Rows:
    """All rows together. The pieces go here: to give their memory back takes long as well."""
    joined = np.concatenate([NO_ROWS, *pieces])
    pieces.clear()
    return joined


def _needs_last_row(selection: Selection) -> bool:
    """Whether it counts from behind: what else it means does not depend on how many rows there are."""
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
    """Puts the number of the last live row into ``found``, -1 where there is none."""
    for end in range(table.ring.num_used, 0, -RUN_PIECE_ROWS):
        begin = max(end - RUN_PIECE_ROWS, 0)
        live = np.flatnonzero(table.is_live(slice(begin, end)))
        if len(live):
            found.append(begin + int(live[-1]))
            return
        yield
    found.append(-1)


def _find_live(table: TableState, item: object, num_numbers: int, lost: RowSet, pieces: list[Rows]) -> Iterator[None]:
    """Puts the live rows that a slice or mask names into ``pieces``, in its order."""
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
    """The numbers and generations of rows as messages carry them; for very many rows, call it in a thread."""
    if len(plan.rows) <= PIECE_ROWS:
        return encode_rows(plan.rows), plan.generations.tobytes()
    return encode_rows(plan.rows), encode_repeats(plan.generations)
