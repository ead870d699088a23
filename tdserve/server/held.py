"""Rows that are unreadable while a write is applied to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.deadline import Deadline
from tdserve.server.entry import Entry
from tdserve.server.sessions.session import ClientSession
from tdserve.spec.tree import Path


class Held:
    """Makes the rows of a write odd, also those of one that a crash has cut short.

    Args:
        entry: The store.
        rows: That are written, each once, and by nobody else: see :func:`wait_for_others`.
        keys: Leaves or nodes that are written; none: all.
    """

    def __init__(self, entry: Entry, rows: NDArray[np.int64], keys: Sequence[Path]) -> None:
        self._entry = entry
        self._rows = rows
        self._keys = keys
        values = entry.generation_values()
        if entry.table is not None:
            entry.table.hold(rows[values[rows] & 1 == 0])
        else:
            values[rows] |= 1
            values[-1] |= 1  # the store's own number
        entry.writes.append(rows)

    def let_go(self, *, is_written: bool) -> None:
        """Makes them readable again, under their next generation; but for those that are lost."""
        entry = self._entry
        self.end()
        if entry.table is None:
            values = entry.generation_values()
            values[self._rows] += 1
            values[entry.lost.rows] |= 1
            values[-1] = (values[-1] | 1) + 1
            values[-1] |= bool(entry.lost or entry.writes)
            return
        written = [number for key in self._keys or [()] for number in entry.numbers_of(key)] if is_written else []
        is_lost = np.isin(self._rows, entry.lost.rows)  # other leaves of them, perhaps
        entry.table.let_go(self._rows[~is_lost], written)

    def end(self) -> None:
        """Nobody writes them any more; they stay unreadable."""
        self._entry.writes[:] = [rows for rows in self._entry.writes if rows is not self._rows]


def is_free(entry: Entry, rows: NDArray[np.int64]) -> bool:
    """Whether nobody is writing one of these rows."""
    return not any(np.isin(rows, others).any() for others in entry.writes)


async def wait_for_others(session: ClientSession, entry: Entry, rows: NDArray[np.int64], deadline: Deadline) -> None:
    """Waits until nobody else is writing one of these rows. Whoever waited for them too may have them by now.

    Raises:
        DeadlineExceededError: Somebody still is: a local client, perhaps a stopped one.
    """
    if entry.writes:
        await session.wait(
            entry.changed,
            lambda: is_free(entry, rows) or None,
            deadline,
            lambda: f"the end of another write to rows of {entry.name!r}",
        )
