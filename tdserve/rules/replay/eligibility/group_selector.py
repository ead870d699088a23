"""Whole groups: a group has all rows with one value of a key; a sample takes a fixed number of them or none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.live_rows import LiveRows
from tdserve.rules.replay.row_indexes.parted_dict import PartedDict
from tdserve.rules.replay.samplers.selector import Drawn, Selector

_NONE = -1

# Steps along the links of groups, about 3 µs each; beyond, one scan over the whole table per group is faster.
_MAX_STEPS = 512


class GroupSelector(Selector):
    """A selector that draws different complete groups, each with the same probability.

    A group is complete if at least ``group_size`` of its rows are members; a sample takes its ``group_size`` oldest,
    adjacent and oldest first. Groups have a number while they have members. The rows of one are linked, oldest first if
    they came in order, as they mostly do; a group to which a row came back late is sorted when it is drawn. Adding,
    removing and drawing cost as much as the rows concerned. Memory: 73 bytes per row of capacity.

    Args:
        columns: Columns of the table.
        group_ids: Value of each row, int64; shared with the owner of the table. A row's value counts when it is added.
        group_size: Rows per group, at least 1.

    Raises:
        InvalidRequestError: ``group_size`` is below 1 or above the capacity.
    """

    def __init__(self, columns: RowColumns, group_ids: NDArray[np.int64], group_size: int) -> None:
        capacity = len(group_ids)
        if not 1 <= group_size <= capacity:
            reason = f"{group_size} is not from 1 to the capacity, {capacity}"
            raise InvalidRequestError(argument="group_size", reason=reason)
        self._columns = columns
        self._group_ids = group_ids
        self._size = group_size
        self._num_members = 0
        # One entry more than rows, for the number -1: it stands for no row, and no gap of a group.
        self._group: Rows = np.full(capacity + 1, _NONE, np.int64)
        self._group[-1] = 0
        self._after: Rows = np.full(capacity + 1, _NONE, np.int64)
        self._before: Rows = np.full(capacity + 1, _NONE, np.int64)
        self._first: Rows = np.full(capacity, _NONE, np.int64)
        self._last: Rows = np.full(capacity, _NONE, np.int64)
        self._is_sorted = np.zeros(capacity, np.bool_)
        self._num_rows: Rows = np.full(capacity, 0, np.int64)
        self._id_of_group: Rows = np.full(capacity, 0, np.int64)
        self._group_of_id = PartedDict(capacity)
        self._unused: list[int] = []
        self._num_numbered = 0
        self._complete = LiveRows(capacity)

    def __len__(self) -> int:
        return self._num_members

    def __repr__(self) -> str:
        num_groups = self._num_numbered - len(self._unused)
        return f"<GroupSelector {self.num_complete} of {num_groups} groups complete>"

    @property
    def num_complete(self) -> int:
        """Number of groups that may be drawn."""
        return len(self._complete)

    @property
    def mass(self) -> float:
        """Number of groups that may be drawn."""
        return float(self.num_complete)

    @property
    def num_drawable(self) -> int:
        """Rows of the samples that can be drawn before a group comes again."""
        return self.num_complete * self._size

    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member; the value of their group is already written.

        Raises:
            LocalProtocolError: A row is a member. Nothing was changed.
        """
        if not len(rows):
            return
        if (self._group[rows] != _NONE).any():
            raise LocalProtocolError(reason="a row that may be drawn was added again")
        ids, place, counts = np.unique(self._group_ids[rows], return_inverse=True, return_counts=True)
        groups = self._number_groups(ids)
        sequence = self._columns.sequence
        rows = rows[np.lexsort((sequence[rows], place))]
        ends = np.cumsum(counts)
        heads, lasts = rows[ends - counts], rows[ends - 1]
        self._group[rows] = np.repeat(groups, counts)
        self._after[rows[:-1]] = rows[1:]
        self._before[rows[1:]] = rows[:-1]
        self._after[lasts] = _NONE
        ahead = self._last[groups]
        is_new = ahead == _NONE
        self._before[heads] = ahead
        self._after[ahead[~is_new]] = heads[~is_new]
        self._first[groups[is_new]] = heads[is_new]
        self._last[groups] = lasts
        self._is_sorted[groups] = is_new | (self._is_sorted[groups] & (sequence[ahead] < sequence[heads]))
        before = self._num_rows[groups]
        self._num_rows[groups] = before + counts
        self._num_members += len(rows)
        self._complete.add(groups[(before < self._size) & (before + counts >= self._size)])

    def remove(self, rows: Rows) -> None:
        """Removes rows, each named once; rows that are not members are ignored."""
        rows = rows[self._group[rows] != _NONE]
        if not len(rows):
            return
        group = self._group[rows]
        self._group[rows] = _NONE
        self._unlink(rows, group)
        groups, counts = np.unique(group, return_counts=True)
        before = self._num_rows[groups]
        self._num_rows[groups] = before - counts
        self._num_members -= len(rows)
        self._complete.remove(groups[(before >= self._size) & (before - counts < self._size)])
        empty = groups[before == counts]
        for value in self._id_of_group[empty].tolist():
            del self._group_of_id.find_part(value)[value]
        self._unused.extend(empty.tolist())

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Chooses ``num_rows / group_size`` different groups; None if fewer are complete.

        Raises:
            InvalidRequestError: The sample's rows are not a multiple of ``group_size``, or above the capacity. Nothing
                was changed.
        """
        num_total = num_total or num_rows
        num_groups, rest = divmod(num_total, self._size)
        if rest:
            raise InvalidRequestError(
                argument="num_rows", reason=f"{num_total} rows are not a whole number of groups of {self._size}"
            )
        if num_total > len(self._group_ids):
            reason = f"{num_total} rows of different groups never fit into a capacity of {len(self._group_ids)}"
            raise InvalidRequestError(argument="num_rows", reason=reason)
        if num_groups > len(self._complete):
            return None
        groups = self._complete.draw_others(rng, num_rows // self._size, num_drawn=num_drawn // self._size)
        return Drawn(self._find_oldest(groups), {})

    def _number_groups(self, ids: NDArray[np.int64]) -> Rows:
        """Returns the numbers of the groups of these values, each named once; a new one for each without members."""
        groups = []
        for value in ids.tolist():
            known = self._group_of_id.find_part(value)
            group = known.get(value)
            if group is None:
                if self._unused:
                    group = self._unused.pop()
                else:
                    group, self._num_numbered = self._num_numbered, self._num_numbered + 1
                known[value] = group
            groups.append(group)
        numbers = np.array(groups, np.int64)
        self._id_of_group[numbers] = ids
        return numbers

    def _unlink(self, rows: Rows, group: Rows) -> None:
        """Removes rows, which are not members any more, from the links of their groups, however many are neighbours."""
        for links in (self._after, self._before):
            # A link to a removed row is replaced by that row's own link: each round doubles the reach.
            while (is_gone := self._group[links[rows]] == _NONE).any():
                gone = rows[is_gone]
                links[gone] = links[links[gone]]
        before, after = self._before[rows], self._after[rows]
        self._after[before] = after
        self._before[after] = before
        self._after[-1] = self._before[-1] = _NONE
        is_first, is_last = before == _NONE, after == _NONE
        self._first[group[is_first]] = after[is_first]
        self._last[group[is_last]] = before[is_last]

    def _find_oldest(self, groups: Rows) -> Rows:
        """Returns the oldest rows of each group, as many as a sample takes."""
        unsorted = groups[~self._is_sorted[groups]]
        is_long = self._num_rows[unsorted] > _MAX_STEPS
        for group in unsorted[is_long].tolist():
            self._sort(np.array([group]), np.flatnonzero(self._group[:-1] == group)[:, None])
        short = unsorted[~is_long]
        if len(short):
            self._sort(short, self._list_linked_members(short, int(self._num_rows[short].max())))
        oldest: Rows = self._list_linked_members(groups, self._size).T.ravel()
        return oldest

    def _list_linked_members(self, groups: Rows, num_steps: int) -> Rows:
        """Returns the first rows of each group by their links, a column per group; -1 behind the last."""
        walked: Rows = np.empty((num_steps, len(groups)), np.int64)
        walked[0] = self._first[groups]
        for step in range(1, num_steps):
            walked[step] = self._after[walked[step - 1]]
        return walked

    def _sort(self, groups: Rows, rows: Rows) -> None:
        """Links all rows of groups again, a column of them per group, oldest first."""
        age = np.where(rows == _NONE, np.iinfo(np.int64).max, self._columns.sequence[rows])
        rows = np.take_along_axis(rows, np.argsort(age, axis=0), axis=0)
        self._after[rows[:-1]], self._before[rows[1:]] = rows[1:], rows[:-1]
        lasts = rows[self._num_rows[groups] - 1, np.arange(len(groups))]
        self._first[groups], self._last[groups] = rows[0], lasts
        self._before[rows[0]] = self._after[lasts] = _NONE
        self._after[-1] = self._before[-1] = _NONE
        self._is_sorted[groups] = True
