"""What slices a table has, found by looking at every place of every trajectory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.slices import Slices, SliceSelector
from tdserve.rules.replay.samplers.trajectories import Trajectories


def row_numbers(rows: Iterable[int]) -> Rows:
    """Returns rows in the form that selectors take."""
    return np.array(list(rows), np.int64)


class Model:
    """A table as plain lists: each trajectory is a list of its places, with None if a row has gone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.columns = RowColumns(capacity)
        self.columns.trajectories = self.links = Trajectories(self.columns, capacity)
        self.selectors: list[tuple[SliceSelector, set[int]]] = []
        self.places: list[list[int | None]] = []
        self.open: dict[int, list[int | None]] = {}
        self.ends: set[int] = set()
        self.live: list[int] = []
        self.sequence = 0

    def view(self, setting: Slices) -> SliceSelector:
        selector = setting.make_selector(self.columns, self.capacity)
        self.selectors.append((selector, set(self.live)))
        selector.add(row_numbers(self.live))
        return selector

    def write(self, writer: int, ends: list[bool], rows: list[int] | None = None) -> None:
        """Writes rows of one writer into free places, then into the oldest."""
        if rows is None:
            free = sorted(set(range(self.capacity)) - set(self.live))
            rows = (free + self.live)[: len(ends)]
        self.remove([row for row in rows if row in self.live])
        for row, end in zip(rows, ends, strict=True):
            if writer not in self.open:
                self.open[writer] = []
                self.places.append(self.open[writer])
            self.open[writer].append(row)
            self.columns.sequence[row] = self.sequence = self.sequence + 1
            if end:
                self.ends.add(row)
                del self.open[writer]
        self.links.append(row_numbers(rows), writer=writer, ends=np.array(ends, np.bool_))
        self.live += rows
        for selector, members in self.selectors:
            selector.add(row_numbers(rows))
            members.update(rows)

    def remove(self, rows: list[int]) -> None:
        for selector, members in self.selectors:
            selector.remove(row_numbers(rows))
            members.difference_update(rows)
        self.links.remove(row_numbers(rows))
        for places in self.places:
            places[:] = [None if row in rows else row for row in places]
        self.live = [row for row in self.live if row not in rows]
        self.ends -= set(rows)
        self.open = {writer: places for writer, places in self.open.items() if places[-1] is not None}

    def slices(self, members: set[int], length: int, *, strict: bool) -> set[tuple[int, ...]]:
        """Returns every slice that may be drawn, by looking at each place of each trajectory."""
        found: set[tuple[int, ...]] = set()
        for places in self.places:
            runs: list[list[int]] = [[]]
            for row in places:
                if row is None or row not in members:
                    runs.append([])
                else:
                    runs[-1].append(row)
            for run in runs:
                found |= {tuple(run[i : i + length]) for i in range(len(run) - length + 1)}
                if not strict and 0 < len(run) < length and run[-1] in self.ends:
                    found.add(tuple(run))
        return found
