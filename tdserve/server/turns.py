"""Long work on the event loop, done piece by piece: whoever else is there is served in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tdserve.messages.row_numbers import RUN_PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import Selection

_Piece = TypeVar("_Piece")


async def in_turns(steps: Iterable[object]) -> None:
    """Takes step after step, with a turn for everybody else between two of them.

    What a step leaves behind must be right for whoever comes in between. The last step is followed by no turn, so that
    work of one step waits for nobody.

    Args:
        steps: Do the work when they are asked for; a generator that yields *between* two pieces of its work.
    """
    for _ in steps:
        await asyncio.sleep(0)


async def sum_in_turns(steps: Iterable[int]) -> int:
    """The sum of what the steps of some work give, with a turn for others after each."""
    total = 0
    for number in steps:
        total += number
        await asyncio.sleep(0)
    return total


async def over_pieces(pieces: Iterable[_Piece], do: Callable[[_Piece], object]) -> None:
    """Does something to piece after piece, with turns for others in between.

    Args:
        pieces: As many at a time as take little time.
        do: Gets a piece.
    """
    for number, piece in enumerate(pieces):
        if number:
            await asyncio.sleep(0)
        do(piece)


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Does work that waits for nothing but its turns without them: of a store that nobody knows yet."""
    for _ in work.__await__():
        pass


async def row_set_of(selection: Selection, batch_size: Sequence[int]) -> RowSet:
    """``Selection.row_set``, in a thread where it takes long."""
    num_rows = batch_size[0] if batch_size else 1
    is_strided = any(isinstance(item, slice) and item.step not in (None, 1, -1) for item in selection.items[:1])
    if not (selection.is_long or (is_strided and num_rows > RUN_PIECE_ROWS)):
        return selection.row_set(batch_size)
    return await asyncio.to_thread(selection.row_set, batch_size)


def free_apart(last_references: list[Any], *, num_rows: int) -> None:
    """Lets go of what was made of rows, in a thread where they are very many: the kernel takes milliseconds to get a
    hundred megabytes back.

    Args:
        last_references: Emptied, by then.
        num_rows: How many rows they are made of.
    """
    if num_rows > RUN_PIECE_ROWS:
        asyncio.get_running_loop().run_in_executor(None, last_references.clear)
