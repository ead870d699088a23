"""The generations that a write expects its rows to have, in the order in which the server looks at rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows, decode_column
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2

Generations = NDArray[Any]
"""Lower halves (uint32) or whole ones (int64), one per row."""


async def find_expected(store: OpenedStore, asked: control_pb2.WriteRequest) -> Generations | None:
    """Returns the generations that a write expects, of each of its rows once, by row number; None: any.

    Args:
        store: Where it writes. Only the rows of a table are compared.
        asked: The write. Its generations are in the order of its selection, which may name a row several times.

    Raises:
        InvalidRequestError: Their number is neither one nor that of the rows that the selection names.
    """
    if store.table is None or not (asked.generations or asked.has_stamps):
        return None
    selection, batch_size = from_message(asked.selection), store.spec.batch_size
    if selection.is_long:
        return await asyncio.to_thread(_decode, asked, selection, batch_size)
    return _decode(asked, selection, batch_size)


def _decode(asked: control_pb2.WriteRequest, selection: Selection, batch_size: Sequence[int]) -> Generations:
    rows = Selection(selection.items[:1]).compute_elements(batch_size[:1])
    generations = decode_column("generation", asked.generations, "<i8" if asked.has_stamps else "<u4", len(rows))
    if np.count_nonzero(rows[1:] > rows[:-1]) == len(rows) - 1:
        return generations
    return _sort_by_row(rows, generations)


def _sort_by_row(rows: Rows, generations: Generations) -> Generations:
    """Returns the generation of each row once, by row number."""
    _, first, place = np.unique(rows, return_index=True, return_inverse=True)
    found = generations[first]
    differs = generations != found[place]
    found[place[differs]] |= 1  # one of its two is of an earlier row; an odd one is that of no live row
    return found
