"""Sums and minima over a number per row, updated as rows change, so that no operation goes over all rows.

Numbers lie in blocks of 16. Each level above has one number per block of the level below, and computes it again from
that block when a number changes: nothing is added to or subtracted from a sum, so nothing drifts. Changes are recorded
at once, and carried up together when a result is requested.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.row_indexes.live_rows import compact

Weights = NDArray[np.float64]

# Summing a block to find a place in it is most of a search: 16 was fastest, measured with 4 to 64.
_SHIFT = 4
_BLOCK = 1 << _SHIFT
# Up to this many numbers one pass over all of them is cheaper than one more level.
_TOP_NUMBERS = 4096
# Most blocks whose change waits; they are carried up in 1 ms. This bounds the list of them, and the time that a request
# may have to spend on it.
_MAX_WAITING = 1 << 11
# Targets that are searched at once: a block of numbers for each of them is in memory.
_MAX_TARGETS = 1 << 14


class PriorityTree:
    """A weight per row; rows are drawn with a probability in proportion to it.

    Args:
        capacity: Number of rows, all of weight 0 at first. About 10 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        num_blocks = -(-capacity // _BLOCK)
        self._weights: Weights = np.zeros((num_blocks, _BLOCK))
        self._flat: Weights = self._weights.reshape(-1)
        self._sums = _Sums(num_blocks, 0.0)
        self._minima = _Minima(num_blocks, np.inf)
        self._waiting = _Waiting()

    @property
    def total(self) -> float:
        """Returns the sum of all weights."""
        self._carry()
        return float(self._sums.top_ends[-1])

    @property
    def min_positive(self) -> float:
        """Returns the smallest weight above 0; infinity if there is none."""
        self._carry()
        return float(self._minima.top.min())

    def get(self, rows: Rows) -> Weights:
        """Returns the weights of rows."""
        return self._flat[rows]

    def set(self, rows: Rows, weights: Weights | float) -> None:
        """Sets the weights of rows, one each or one for all: at least 0, and small enough that their sum is finite."""
        self._flat[compact(rows)] = weights
        if self._waiting.add(rows):
            self._carry()

    def find(self, targets: Weights) -> Rows:
        """Returns the rows in whose part of the total the targets lie, if the weights are laid end to end by row
        number.

        Args:
            targets: From 0 to the total, which must be above 0. A target that rounding has put behind the last row of a
                positive weight selects this row.

        Returns:
            Rows; never one of weight 0.
        """
        self._carry()
        if len(targets) <= _MAX_TARGETS:
            return self._find(targets)
        starts = range(0, len(targets), _MAX_TARGETS)
        return np.concatenate([self._find(targets[start : start + _MAX_TARGETS]) for start in starts])

    def _find(self, targets: Weights) -> Rows:
        # An end that equals the previous one belongs to a number that adds nothing. The first end above a target never
        # is one of these; and there is one above it, because targets are kept below the last.
        ends = self._sums.top_ends
        targets = np.minimum(targets, np.nextafter(ends[-1], 0.0))
        found: Rows = np.searchsorted(ends, targets, side="right")
        targets = targets - np.where(found > 0, ends[found - 1], 0.0)
        order = np.arange(len(targets))
        for level_ends in (*self._sums.ends[::-1], None):
            if level_ends is None:
                block_ends = np.add.accumulate(self._weights.take(found, axis=0), axis=1)
            else:
                block_ends = level_ends.take(found, axis=0)
            targets = np.minimum(targets, np.nextafter(block_ends[:, -1], 0.0))
            places = np.greater(block_ends, targets[:, None]).argmax(axis=1)
            targets = targets - np.where(places > 0, block_ends[order, places - 1], 0.0)
            found = (found << _SHIFT) + places
        return found

    def _carry(self) -> None:
        blocks = self._waiting.take()
        if blocks is not None:
            weights = self._weights.take(blocks, axis=0)
            self._sums.put(blocks, np.add.reduce(weights, axis=1))
            self._minima.put(blocks, np.where(weights > 0, weights, np.inf).min(axis=1))


class MinTree:
    """A key for some rows, of which the lowest are found. A row with the key 0 is a member; a row without a key is not.

    Keys are complex numbers, which NumPy orders by their real parts, and equal ones by their imaginary parts.

    Args:
        capacity: Number of rows, none a member at first. About 18 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        num_blocks = -(-capacity // _BLOCK)
        self._keys = np.full((num_blocks, _BLOCK), complex(np.inf))
        self._minima = _Minima(num_blocks, complex(np.inf))
        self._waiting = _Waiting()

    def set(self, rows: Rows, keys: NDArray[Any]) -> None:
        """Sets finite keys of rows, whether they are members already or not."""
        self._keys.reshape(-1)[rows] = keys
        if self._waiting.add(rows):
            self._carry()

    def drop(self, rows: Rows) -> None:
        """Removes rows."""
        self.set(rows, np.full(len(rows), np.inf))

    def find_lowest(self, num_rows: int) -> Rows:
        """Returns the rows of the lowest keys, lowest first; all members if there are fewer."""
        self._carry()
        keys = self._minima.top
        found: Rows = np.arange(len(keys))
        for level in (*self._minima.levels[-2::-1], self._keys):
            # No row of a block outside the num_rows lowest ones is needed: each of those has a row as low.
            blocks = found[_find_lowest_places(keys, num_rows)]
            found = ((blocks << _SHIFT)[:, None] + np.arange(_BLOCK)).reshape(-1)
            keys = level.take(blocks, axis=0).reshape(-1)
        places = _find_lowest_places(keys, num_rows)
        return found[places[np.argsort(keys[places], kind="stable")]]

    def _carry(self) -> None:
        blocks = self._waiting.take()
        if blocks is not None:
            self._minima.put(blocks, self._keys.take(blocks, axis=0).min(axis=1))


class _Minima:
    """Numbers in blocks, and the smallest one of each block as a number of the level above, until few are left.

    Attributes:
        levels: The lowest first, each ``[num_blocks, 16]``.
    """

    def __init__(self, num_entries: int, empty: complex) -> None:
        self.levels: list[NDArray[Any]] = []
        while True:
            num_blocks = -(-num_entries // _BLOCK)
            self.levels.append(np.full((num_blocks, _BLOCK), empty))
            if num_blocks * _BLOCK <= _TOP_NUMBERS:
                break
            num_entries = num_blocks

    @property
    def top(self) -> NDArray[Any]:
        """Returns the few numbers of the top level."""
        return self.levels[-1].reshape(-1)

    def put(self, entries: Rows, numbers: NDArray[Any]) -> None:
        """Writes numbers of the lowest level, and carries them up."""
        self.levels[0].reshape(-1)[entries] = numbers
        for num_level, above in enumerate(self.levels[1:]):
            entries = sort_unique(entries >> _SHIFT)
            above.reshape(-1)[entries] = self._combine_blocks(num_level, entries)

    def _combine_blocks(self, num_level: int, blocks: Rows) -> NDArray[Any]:
        smallest: NDArray[Any] = self.levels[num_level].take(blocks, axis=0).min(axis=1)
        return smallest


class _Sums(_Minima):
    """The same with sums, whose partial sums are kept as well.

    Attributes:
        ends: For each level but the top, the lowest first: the sums from the first number of a block to each one.
        top_ends: Such sums over the whole top.
    """

    def __init__(self, num_entries: int, empty: complex) -> None:
        super().__init__(num_entries, empty)
        self.ends = [np.zeros_like(level) for level in self.levels[:-1]]
        self.top_ends: Weights = np.zeros_like(self.top)

    def put(self, entries: Rows, numbers: NDArray[Any]) -> None:
        """See the base class."""
        super().put(entries, numbers)
        np.add.accumulate(self.top, out=self.top_ends)

    def _combine_blocks(self, num_level: int, blocks: Rows) -> NDArray[Any]:
        block_ends = np.add.accumulate(self.levels[num_level].take(blocks, axis=0), axis=1)
        self.ends[num_level][blocks] = block_ends
        return block_ends[:, -1]


class _Waiting:
    """Blocks of rows that were changed and not carried up yet."""

    def __init__(self) -> None:
        self._blocks: list[Rows] = []
        self._num_blocks = 0

    def add(self, rows: Rows) -> bool:
        """Adds the blocks of rows; returns whether there are too many to wait."""
        blocks = rows >> _SHIFT
        if len(blocks) > _BLOCK:  # sixteen consecutive rows share a block
            is_other = np.ones(len(blocks), np.bool_)
            np.not_equal(blocks[1:], blocks[:-1], out=is_other[1:])
            blocks = blocks[is_other]
        self._blocks.append(blocks)
        self._num_blocks += len(blocks) + 1  # an empty array takes room as well
        return self._num_blocks > _MAX_WAITING

    def take(self) -> Rows | None:
        """Removes and returns the blocks, each once; None if there are none."""
        if not self._blocks:
            return None
        blocks = np.concatenate(self._blocks)
        self._blocks, self._num_blocks = [], 0
        return sort_unique(blocks)


def _find_lowest_places(numbers: NDArray[Any], num_wanted: int) -> Rows:
    places = np.flatnonzero(numbers < np.inf)
    if len(places) > num_wanted:
        places = places[np.argpartition(numbers[places], num_wanted - 1)[:num_wanted]]
    return places
