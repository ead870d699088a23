"""Sampling in epochs: every row once, in random order, then all of them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.base.integers import check_integer
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.epochs import MAX_SORTED_ROWS, EncipheredOrder, EpochOrder, SortedOrder
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.selector import Drawn, Selector

_ABSENT = -1


@dataclass(frozen=True)
class WithoutReplacement(Sampler):
    """Draws every row once per epoch, in random order; all callers share the epoch.

    A sample that reaches the end of an epoch is filled from the next one, with rows that it does not have yet. Rows
    that come during an epoch belong to the next one; rows that go are skipped. Rows of a sample that could not be sent
    have had their turn: they come again in the next epoch. A sample of more rows than there are is refused.

    How far an epoch was is not on record. A restarted server begins a new one; with a seed, in the order of the first.

    As the sampler of ``store.batches`` it is the order of one epoch, divided among the readers.

    Args:
        seed: For a replay: the same samples and rows in the same order give the same epochs; None: different ones each
            time. For a store: the same order for every reader; None is 0.
    """

    seed: int | None = field(default=None, metadata={"is_omitted": True})

    kind: ClassVar[str] = "without_replacement"
    keeps_epoch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.seed is not None:
            object.__setattr__(self, "seed", check_integer("seed", self.seed, 0))

    def make_selector(self, columns: RowColumns, capacity: int) -> EpochSelector:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return EpochSelector(capacity, seed=self.seed)

    def make_epoch_order(self, num_rows: int, epoch: int) -> EpochOrder:
        """Returns a random order; without a seed it has seed 0."""
        kind = SortedOrder if num_rows <= MAX_SORTED_ROWS else EncipheredOrder
        return kind(num_rows, seed=self.seed or 0, epoch=epoch)


class EpochSelector(Selector):
    """The selector of :class:`WithoutReplacement`; methods as in
    :class:`~tdserve.rules.replay.samplers.selector.Selector`.

    The members lie densely in an array, first those that are still due in this epoch, then the others; a second array
    has the place of each row. Each draw takes a random part of those due. This gives the same epochs as an order that
    is shuffled in advance, without the pause for shuffling. Memory: 16 bytes per row of capacity.
    """

    def __init__(self, capacity: int, *, seed: int | None = None) -> None:
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._members: Rows = np.full(capacity, _ABSENT, np.int64)  # as in LiveRows
        self._place: Rows = np.full(capacity, _ABSENT, np.int64)
        self._num = 0
        self._num_due = 0
        self._num_epochs = 0
        # Of the current sample, where those due begin that it may still have, in this epoch and in the next one: in
        # front is what it had before. None if the epoch is already the second one of the sample.
        self._front = 0
        self._next_front: int | None = None

    def __len__(self) -> int:
        return self._num

    @property
    def mass(self) -> float:
        """Rows that are due in this epoch."""
        return float(self._num_due)

    @property
    def num_epochs(self) -> int:
        """See :class:`~tdserve.rules.replay.samplers.selector.Selector`."""
        return self._num_epochs

    def __repr__(self) -> str:
        return f"<EpochSelector {self._num} rows, {self._num_due} of them due>"

    def add(self, rows: Rows) -> None:
        """Adds rows, for the next epoch.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        if (self._place[rows] != _ABSENT).any():
            raise LocalProtocolError(reason="a row that may be drawn was made so again")
        end = self._num + len(rows)
        self._members[self._num : end] = rows
        self._place[rows] = np.arange(self._num, end)
        self._num = end

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members."""
        places = self._place[rows]
        is_due = (places != _ABSENT) & (places < self._num_due)
        self._num_due = self._move_last(rows[is_due], self._num_due)
        rows = rows[places != _ABSENT]
        self._num = self._move_last(rows, self._num)
        self._place[rows] = _ABSENT

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Returns the next rows of the epoch; None if there are no rows at all.

        Raises:
            InvalidRequestError: The sample has more rows than there are members.
        """
        if not self._num:
            return None
        if not num_drawn:
            if (num_total := max(num_total, num_rows)) > self._num:
                reason = f"{num_total} rows without replacement are more than the {self._num} that may be drawn"
                raise InvalidRequestError(argument="num_rows", reason=reason)
            self._front, self._next_front = 0, self._num_due
        num_left = self._num_due - self._front
        num_next = num_rows - num_left  # of the next epoch
        if num_next > (0 if self._next_front is None else self._num - self._next_front):
            return None  # rows have gone since it began
        rng = self._rng or rng
        first = self._take(min(num_rows, num_left), rng)
        if num_next <= 0 or self._next_front is None:
            return Drawn(first, {})
        self._num_epochs += 1
        # The epoch is over. What the sample has lies in front: all rows that follow are not in it yet.
        self._num_due, self._front, self._next_front = self._num, self._next_front, None
        return Drawn(np.concatenate((first, self._take(num_next, rng))), {})

    def _take(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Takes different rows among those due, except those in front; they are not due any more."""
        places = self._front + rng.choice(self._num_due - self._front, num_rows, replace=False)
        rows: Rows = self._members[places]
        self._num_due = self._move_last(rows, self._num_due)
        return rows

    def _move_last(self, rows: Rows, end: int) -> int:
        """Exchanges rows that lie below ``end`` with those just below it; returns where they begin now."""
        left = end - len(rows)
        places = self._place[rows]
        last = self._members[left:end]
        self._place[rows] = _ABSENT
        staying = last[self._place[last] != _ABSENT]
        gaps = places[places < left]
        self._members[gaps] = staying
        self._place[staying] = gaps
        self._members[left:end] = rows
        self._place[rows] = np.arange(left, end)
        return left
