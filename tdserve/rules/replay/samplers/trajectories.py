"""The order of rows in trajectories. A trajectory is one writer's rows in the order of their commits, linked by row
number.

Rows of many writers interleave in the ring, and any writer may refill a deleted row. So neighbours in the ring are
unrelated, and only these links count.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.parted_dict import PartedDict

_NONE = -1

_ID_BITS = 64

MAX_ALONE = 8
"""So few rows are walked from one by one, which takes a tenth of the time of a step for all of them."""


class Trajectories:
    """Links between the rows of a table, in both directions.

    A trajectory is *open* while its writer may continue it: until a row that ends it, or until its last row is gone.
    ``columns.previous`` and ``columns.is_end`` are written in place, and their owner keeps them over a restart; all
    other state follows from them.

    Args:
        columns: Columns of the table.
        capacity: Number of rows.

    Attributes:
        after: Number of the row that follows each row, -1 if there is none. It has one entry more than there are rows,
            so that -1 leads to -1.
        before: Number of the row before each row, likewise.
    """

    def __init__(self, columns: RowColumns, capacity: int) -> None:
        self.after: Rows = np.full(capacity + 1, _NONE, np.int64)
        self.before: Rows = np.full(capacity + 1, _NONE, np.int64)
        self._columns = columns
        self._previous: Rows = np.asarray(columns.previous)  # the plain array of a memmap: indexing is twice as fast
        self._is_end: NDArray[np.bool_] = np.asarray(columns.is_end)
        self._is_tail: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._tails = PartedDict(capacity)  # the last row of each open trajectory, by its name
        self._writer_of_tail: Rows = np.zeros(capacity, np.int64)
        self._id_of_tail: Rows = np.zeros(capacity, np.int64)

    def __repr__(self) -> str:
        return f"<Trajectories of {len(self._is_tail)} rows, {self.num_open} open>"

    @property
    def num_open(self) -> int:
        """Number of trajectories that their writer may continue."""
        return int(np.count_nonzero(self._is_tail))

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
        ids: NDArray[np.int64] | None = None,
    ) -> None:
        """Links rows of one writer, in the order in which it commits them. None of them may have a link: see
        :meth:`remove`.

        Args:
            rows: Row numbers, each once.
            writer: Their writer; rows of several are never linked.
            ends: Which of the rows are the last of their trajectory, as many as ``rows``.
            ids: Trajectory of each row: the writer's rows of one value are linked, even if they
                interleave with others. Without them the writer has one trajectory at a time.
        """
        if not len(rows):
            return
        is_end = np.zeros(len(rows), np.bool_) if ends is None else ends
        own_ids = heads = np.zeros(1, np.int64)
        is_joint = ~is_end[:-1]
        if ids is not None:
            own_ids, group = np.unique(ids, return_inverse=True)
            order = np.argsort(group, kind="stable")
            rows, is_end, group = rows[order], is_end[order], group[order]
            is_same = group[1:] == group[:-1]
            heads = np.concatenate((heads, np.flatnonzero(~is_same) + 1))
            is_joint = is_same & ~is_end[:-1]
        before: Rows = np.full(len(rows), _NONE, np.int64)
        before[1:][is_joint] = rows[:-1][is_joint]
        lasts = np.append(heads[1:], len(rows)) - 1
        before[heads] = self._move_tails(_hash_writer(writer, ids), own_ids, rows[lasts], ~is_end[lasts])
        is_linked = before != _NONE
        self.before[rows] = before
        self.after[rows] = _NONE
        self.after[before[is_linked]] = rows[is_linked]
        self._previous[rows] = before + 1
        self._is_end[rows] = is_end

    def take_back(self, rows: Rows, *, writer: Hashable, ids: NDArray[np.int64] | None = None) -> None:
        """Undoes the last :meth:`append` of this writer: its trajectories are open where they were. Arguments as
        there."""
        before = self.before[rows]
        is_earlier = (before != _NONE) & ~np.isin(before, rows)
        earlier = before[is_earlier]
        self.remove(rows)
        own_ids = np.zeros(len(earlier), np.int64) if ids is None else ids[is_earlier]
        self._move_tails(_hash_writer(writer, ids), own_ids, earlier, np.ones(len(earlier), np.bool_))

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
        for number, trajectory_id in zip(
            self._writer_of_tail[tails].tolist(), self._id_of_tail[tails].tolist(), strict=True
        ):
            name = (number << _ID_BITS) + trajectory_id
            del self._tails.find_part(name)[name]

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
        if len(starts) <= MAX_ALONE:
            return self._follow_alone(starts, length)
        found = np.empty((length, len(starts)), np.int64)
        found[0] = starts
        for step in range(1, length):
            np.take(self.after, found[step - 1], out=found[step], mode="wrap")
        return np.ascontiguousarray(found.T)

    def _follow_alone(self, starts: Rows, length: int) -> Rows:
        """Does what :meth:`follow` does, for one start after the other."""
        after = self.after.data  # which is indexed faster than an array
        found = np.empty((len(starts), length), np.int64)
        for number, row in enumerate(starts.tolist()):
            walk = []
            for _ in range(length):
                walk.append(row)
                row = after[row]
            found[number] = walk
        return found

    def _move_tails(self, writer: int, ids: Rows, rows: Rows, is_open: NDArray[np.bool_]) -> Rows:
        """Opens trajectories of a writer with these last rows, or closes them; returns their last rows so far, -1 where
        there is none."""
        found = []
        for each, row, opens in zip(ids.tolist(), rows.tolist(), is_open.tolist(), strict=True):
            name = (writer << _ID_BITS) + each
            tails = self._tails.find_part(name)
            found.append(tails.pop(name, _NONE))
            if opens:
                tails[name] = row
        before: Rows = np.array(found, np.int64)
        self._is_tail[before[before != _NONE]] = False
        self._is_tail[rows] = is_open
        self._writer_of_tail[rows], self._id_of_tail[rows] = writer, ids
        return before


def _hash_writer(writer: Hashable, ids: NDArray[np.int64] | None) -> int:
    """Returns a number for a writer with or without ids, hardly ever that of another."""
    return hash((writer, ids is None))
