"""Long work on the event loop, done piece by piece, so that other requests are served in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tdserve.messages.row_numbers import RUN_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import Selection

_Piece = TypeVar("_Piece")


async def run_in_turns(steps: Iterable[object]) -> None:
    """Takes the steps of some work, with a turn of the event loop between two of them.

    Other coroutines run in between, so each step must leave a consistent state. No turn follows the last step: work of
    one step does not wait.

    Args:
        steps: Does the work as it is iterated: a generator that yields *between* two pieces of its work.
    """
    for _ in steps:
        await asyncio.sleep(0)


async def sum_in_turns(steps: Iterable[int], *, is_long: bool) -> int:
    """Returns the sum of what the steps of some work yield, with a turn of the event loop after each.

    Args:
        is_long: Whether there may be several steps. Otherwise they are taken at once: a turn costs as much as a small
            request.
    """
    if not is_long:
        return sum(steps)
    total = 0
    for number in steps:
        total += number
        await asyncio.sleep(0)
    return total


async def call_in_turns(pieces: Iterable[_Piece], do: Callable[[_Piece], object]) -> None:
    """Calls ``do`` with each piece, with a turn of the event loop between two of them.

    Args:
        pieces: Pieces that are small enough to take little time.
        do: Handles a piece.
    """
    for number, piece in enumerate(pieces):
        if number:
            await asyncio.sleep(0)
        do(piece)


def run_without_turns(work: Coroutine[Any, Any, None]) -> None:
    """Runs work that was written to be done in turns without a break: little work, or work on a store that is not in
    use."""
    for _ in work.__await__():
        pass


async def build_row_set(selection: Selection, batch_size: Sequence[int]) -> RowSet:
    """Returns ``Selection.compute_row_set``, computed in a thread if it takes long."""
    num_rows = batch_size[0] if batch_size else 1
    is_strided = any(isinstance(item, slice) and item.step not in (None, 1, -1) for item in selection.items[:1])
    if not (selection.is_long or (is_strided and num_rows > RUN_PIECE_ROWS)):
        return selection.compute_row_set(batch_size)
    return await asyncio.to_thread(selection.compute_row_set, batch_size)


def drop_references(last_references: list[Any], *, num_rows: int) -> None:
    """Frees what was made of rows, in a thread if they are very many: the kernel needs milliseconds for 100 MB.

    Args:
        last_references: The last references to it; emptied, sooner or later.
        num_rows: Number of rows that it is made of.
    """
    if num_rows > RUN_PIECE_ROWS:
        asyncio.get_running_loop().run_in_executor(None, last_references.clear)
    else:
        last_references.clear()
