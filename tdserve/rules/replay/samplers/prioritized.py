"""Sampling in proportion to priorities, as in prioritized experience replay (https://arxiv.org/abs/1511.05952)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tdserve.base.arguments import to_finite_number
from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.live_rows import compact
from tdserve.rules.replay.row_indexes.priorities import PriorityTree
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.selector import Drawn, Selector

# A large priority to a large power is no finite float. Any table has a finite sum of weights up to this one.
_MAX_WEIGHT = 1e288
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


_FEW = 512
"""Up to this many rows, weights are computed one by one, whether they are equal or not."""


@dataclass(frozen=True)
class Prioritized(Sampler):
    """Draws row i with probability ``P(i) = (priority_i + eps) ** alpha / sum``, each draw independent of the others.

    Samples have ``"priority"``, ``"probability"`` and ``"priority_weight"``, each float32. The last is ``(P(i) / min P)
    ** -beta``, the factor of a row's loss that undoes the preference. It is at most 1, for the least likely row of the
    whole table.

    Attributes:
        alpha: How much priorities count, from 0; 0 is uniform.
        beta: How much the weights undo, from 0; 1 undoes it all. ``table.set_sampler`` changes it in a live table.
        eps: Added to every priority, from 0; with 0, rows of priority 0 are left out.
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-8

    kind: ClassVar[str] = "prioritized"
    uses_priority: ClassVar[bool] = True
    counts_samples: ClassVar[bool] = True
    adds: ClassVar[tuple[str, ...]] = ("priority", "probability", "priority_weight")
    is_independent: ClassVar[bool] = True
    changeable: ClassVar[tuple[str, ...]] = ("beta",)

    def __post_init__(self) -> None:
        for argument in ("alpha", "beta", "eps"):
            object.__setattr__(self, argument, to_finite_number(argument, getattr(self, argument)))

    def weigh_priorities(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        with np.errstate(over="ignore"):
            weights: NDArray[np.float64] = (priorities + self.eps) ** self.alpha
        return np.minimum(weights, _MAX_WEIGHT)

    def make_selector(self, columns: RowColumns, capacity: int) -> PrioritizedSelector:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return PrioritizedSelector(self, columns, capacity)


class PrioritizedSelector(Selector):
    """The selector of :class:`Prioritized`; methods as in :class:`~tdserve.rules.replay.samplers.selector.Selector`."""

    def __init__(self, sampler: Prioritized, columns: RowColumns, capacity: int) -> None:
        self._sampler = sampler
        self._priority = columns.priority
        self._tree = PriorityTree(capacity)
        self._is_member = np.zeros(capacity, np.bool_)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"<PrioritizedSelector {self._num_rows} rows>"

    @property
    def mass(self) -> float:
        """Sum of the weights of all rows."""
        return self._tree.total

    @property
    def least_mass(self) -> float:
        """The least weight of a row that may be drawn."""
        return self._tree.min_positive

    @property
    def num_drawable(self) -> int:
        """Members without those of priority 0, if these are never drawn."""
        if self._sampler.eps:
            return self._num_rows
        return int(np.count_nonzero(self._tree.get(np.flatnonzero(self._is_member))))

    def explain_none(self) -> str:
        """See :class:`~tdserve.rules.replay.samplers.selector.Selector`."""
        if not self._num_rows or self._tree.total:
            return ""
        return f"the {self._num_rows} that may be drawn have priority 0, which is never drawn with eps=0"

    def set_sampler(self, sampler: Prioritized) -> None:
        """Draws with another ``beta`` from now on; weights in the tree do not depend on it."""
        self._sampler = sampler

    def add(self, rows: Rows) -> None:
        """Adds rows with their priorities.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        where = compact(rows)
        if self._is_member[where].any():
            raise LocalProtocolError(reason="a row that may be drawn was made so again")
        self._is_member[where] = True
        self._num_rows += len(rows)
        self._tree.set(rows, self._compute_weights(rows))

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members."""
        is_member = self._is_member[compact(rows)]
        rows = rows if is_member.all() else rows[is_member]
        self._is_member[compact(rows)] = False
        self._num_rows -= len(rows)
        self._tree.set(rows, 0.0)

    def update(self, rows: Rows) -> None:
        """Reads the priorities of those rows that are members again."""
        rows = rows[self._is_member[rows]]
        self._tree.set(rows, self._compute_weights(rows))

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Returns rows, each drawn on its own; None if no row has a weight above 0."""
        whole = self._tree.total
        if not whole:
            return None
        # A search in order finds its numbers in the cache, twice as fast (measured); then the order is mixed again.
        targets = np.sort(rng.random(num_rows) * whole)
        rows = self._tree.find(targets)[rng.permutation(num_rows)]
        weights = self._tree.get(rows)
        columns = {
            "priority": np.minimum(self._priority[rows], _MAX_FLOAT32).astype(np.float32),
            "probability": (weights / whole).astype(np.float32),
            "priority_weight": ((self._tree.min_positive / weights) ** self._sampler.beta).astype(np.float32),
        }
        return Drawn(rows, columns)

    def _compute_weights(self, rows: Rows) -> NDArray[np.float64]:
        priorities = self._priority[compact(rows)]
        if len(rows) > _FEW and np.count_nonzero(priorities == priorities[0]) == len(rows):
            priorities = priorities[:1]  # rows without a priority have the same one: one weight for all
        return self._sampler.weigh_priorities(priorities)
