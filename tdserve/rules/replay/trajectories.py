"""The order of rows in trajectories. A trajectory is one writer's rows in the order of their commits, linked by row
number.

Rows of many writers interleave in the ring, and any writer may refill a deleted row. So neighbours in the ring are
unrelated, and only these links count.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.rules.replay.columns import RowColumns
from tdserve.rules.replay.live_rows import Rows

_NONE = -1


class Trajectories:
    """Links between the rows of a table, in both directions.

    A trajectory is *open* while its writer may continue it: until a row that ends it, until :meth:`end`, or until its
    last row is gone. ``columns.previous`` and ``columns.is_end`` are written in place, and their owner keeps them over
    a restart; all other state follows from them.

    Args:
        columns: Columns of the table.
        capacity: Number of rows.

    Attributes:
        after: Number of the row that follows each row, -1 if there is none. It has one entry more than there are rows,
            so that -1 leads to -1.
        before: The same backwards.
    """

    def __init__(self, columns: RowColumns, capacity: int) -> None:
        self.after: Rows = np.full(capacity + 1, _NONE, np.int64)
        self.before: Rows = np.full(capacity + 1, _NONE, np.int64)
        self._columns = columns
        self._previous: Rows = np.asarray(columns.previous)  # the plain array of a memmap: indexing is twice as fast
        self._is_end: NDArray[np.bool_] = np.asarray(columns.is_end)
        self._is_tail: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._tails: dict[Hashable, dict[Hashable, int]] = {}
        self._owner_of_tail: dict[int, tuple[Hashable, Hashable]] = {}

    def __repr__(self) -> str:
        return f"<Trajectories of {len(self._is_tail)} rows, {self.num_open} open>"

    @property
    def num_open(self) -> int:
        """Number of trajectories that their writer may continue."""
        return len(self._owner_of_tail)

    @property
    def is_end(self) -> NDArray[np.bool_]:
        """Whether each row is the last of its trajectory, by row number."""
        return self._is_end

    def append(
        self,
        rows: Rows,
        *,
        writer: Hashable,
        ends: NDArray[np.bool_] | None = None,
        ids: NDArray[Any] | None = None,
    ) -> None:
        """Links rows of one writer, in the order in which it commits them. None of them may have a link: see
        :meth:`remove`.

        Args:
            rows: Row numbers, each once.
            writer: Their writer; rows of several are never linked.
            ends: Which of the rows are the last of their trajectory, as many as ``rows``.
            ids: Trajectory of each row, int64 or bytes: the writer's rows of one value are linked, even if they
                interleave with others. Without them the writer has one trajectory at a time.
        """
        if not len(rows):
            return
        is_end = np.zeros(len(rows), np.bool_) if ends is None else ends
        names: list[Hashable] = [None]
        heads = np.zeros(1, np.int64)
        is_joint = ~is_end[:-1]
        if ids is not None:
            distinct, group = np.unique(ids, return_inverse=True)
            order = np.argsort(group, kind="stable")
            rows, is_end, group = rows[order], is_end[order], group[order]
            is_same = group[1:] == group[:-1]
            names = distinct.tolist()
            heads = np.concatenate((heads, np.flatnonzero(~is_same) + 1))
            is_joint = is_same & ~is_end[:-1]
        before: Rows = np.full(len(rows), _NONE, np.int64)
        before[1:][is_joint] = rows[:-1][is_joint]
        before[heads] = self._close_tails(writer, names)
        is_linked = before != _NONE
        self.before[rows] = before
        self.after[rows] = _NONE
        self.after[before[is_linked]] = rows[is_linked]
        self._previous[rows] = before + 1
        self._is_end[rows] = is_end
        lasts = np.append(heads[1:], len(rows)) - 1
        self._open_tails(writer, names, rows[lasts], ~is_end[lasts])

    def take_back(self, rows: Rows, *, writer: Hashable, ids: NDArray[Any] | None = None) -> None:
        """Undoes the last :meth:`append` of this writer: its trajectories are open where they were. Arguments as
        there."""
        before = self.before[rows]
        is_earlier = (before != _NONE) & ~np.isin(before, rows)
        earlier = before[is_earlier]
        names: list[Hashable] = [None] * len(earlier) if ids is None else ids[is_earlier].tolist()
        self.remove(rows)
        self._open_tails(writer, names, earlier, np.ones(len(earlier), np.bool_))

    def end(self, writer: Hashable) -> Rows:
        """Ends every open trajectory of a writer: its last row so far is the last one.

        Returns:
            Those last rows, sorted; their ``is_end`` has changed, which is an ``update`` for selectors.
        """
        tails = self._tails.pop(writer, {})
        rows = np.sort(np.fromiter(tails.values(), np.int64, len(tails)))
        for row in tails.values():
            del self._owner_of_tail[row]
        self._is_tail[rows] = False
        self._is_end[rows] = True
        return rows

    def remove(self, rows: Rows) -> None:
        """Cuts the links of rows that have gone. The rows before and after them are linked no more, not even to each
        other.

        Selectors follow the links when they drop rows, so they come first. Rows without links are ignored.
        """
        before, after = self.before[rows], self.after[rows]
        self.after[before] = _NONE  # -1 is the entry behind the last row, which is -1 anyway
        self.before[after] = _NONE
        self._previous[after[after != _NONE]] = 0
        self.before[rows] = _NONE
        self.after[rows] = _NONE
        self._previous[rows] = 0
        self._is_end[rows] = False
        tails = rows[self._is_tail[rows]]
        self._is_tail[tails] = False
        for row in tails.tolist():
            writer, name = self._owner_of_tail.pop(row)
            del self._tails[writer][name]
            if not self._tails[writer]:
                del self._tails[writer]

    def restore(self, live_rows: Rows) -> None:
        """Rebuilds the links from the stored ``columns.previous``, which may be some writes old.

        A link is valid if it leads to a live row that was committed earlier and ended no trajectory. No trajectory is
        open afterwards: a writer that continues begins another one.

        Args:
            live_rows: All rows that may be read.
        """
        capacity = len(self._is_tail)
        self.after[:] = self.before[:] = _NONE
        self._is_tail[:] = False
        self._tails.clear()
        self._owner_of_tail.clear()
        sequence = self._columns.sequence
        before = self._previous[live_rows] - 1
        before[(before < 0) | (before >= capacity)] = _NONE
        is_live = np.zeros(capacity + 1, np.bool_)
        is_live[live_rows] = True
        holds = is_live[before] & (sequence[before] < sequence[live_rows]) & ~self._is_end[before] & (before >= 0)
        self.after[before[holds]] = live_rows[holds]
        holds &= self.after[before] == live_rows  # damaged if two rows follow one: the other link is dropped
        self.before[live_rows[holds]] = before[holds]
        self._previous[live_rows[~holds]] = 0

    def follow(self, starts: Rows, length: int) -> Rows:
        """Returns the rows from each start on, itself included: ``[len(starts), length]``, -1 behind the end of a
        trajectory."""
        return self._walk(self.after, starts, length)

    def back(self, rows: Rows, length: int) -> Rows:
        """Returns the rows backwards from each row, itself first: ``[len(rows), length]``, -1 if there are no earlier
        ones."""
        return self._walk(self.before, rows, length)

    @staticmethod
    def _walk(links: Rows, rows: Rows, length: int) -> Rows:
        found = np.empty((length, len(rows)), np.int64)
        found[0] = rows
        for step in range(1, length):
            np.take(links, found[step - 1], out=found[step], mode="wrap")
        return np.ascontiguousarray(found.T)

    def _close_tails(self, writer: Hashable, names: list[Hashable]) -> Rows:
        """Closes a writer's open trajectories and returns their last rows, -1 if there is none."""
        tails = self._tails.get(writer, {})
        rows = [tails.pop(name, _NONE) for name in names]
        for row in rows:
            self._owner_of_tail.pop(row, None)
        found: Rows = np.array(rows, np.int64)
        self._is_tail[found[found != _NONE]] = False
        return found

    def _open_tails(self, writer: Hashable, names: list[Hashable], rows: Rows, is_open: NDArray[np.bool_]) -> None:
        tails = self._tails.setdefault(writer, {})
        for name, row, opens in zip(names, rows.tolist(), is_open.tolist(), strict=True):
            if opens:
                tails[name] = row
                self._owner_of_tail[row] = (writer, name)
        self._is_tail[rows[is_open]] = True
        if not tails:
            del self._tails[writer]
