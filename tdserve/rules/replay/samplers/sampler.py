"""Samplers: how a sample's rows are chosen. A sampler is a setting; its selector does the work.

Steps for a new sampler (a remover or limiter has the same but the third; what a limiter's ``make_part`` returns is the
limiter of each shard of a shared table):

1. a class in a module of its own,
2. an entry in ``RULES`` of :mod:`tdserve.rules.replay.settings`,
3. if it adds a column to samples: append that to ``ADDED_COLUMNS`` of :mod:`tdserve.messages.content`, and describe it
   in §5.3 of the protocol book,
4. to export it, a line in ``tdserve/__init__.py`` and one in its stub, ``__init__.pyi``.

``tests/unit/rules/replay/samplers/test_toy_sampler.py`` adds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.live_rows import LiveRows
from tdserve.rules.replay.samplers.epochs import EpochOrder, NumberOrder
from tdserve.rules.replay.samplers.selector import Drawn, Selector


class Sampler(ABC):
    """Base of all samplers: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name in JSON.
        uses_priority: Whether its selector reads priorities: then the table keeps them, and callers may change them.
        counts_samples: Whether the table counts how often each row was sampled.
        adds: Keys of the columns that a sample has beside its rows, see :class:`Drawn`.
        is_independent: Whether one draw may serve several samples: each row is drawn on its own. A batch of a sampler
            that is neither this, nor ordered, nor keeps an epoch is one unit, see :meth:`compute_unit`.
        draws_any_row: Whether every live row has the same probability, whatever was drawn before. Then a reader may
            draw rows by itself.
        is_ordered: Whether the order of a sample's rows matters. Such a sampler can also order a queue.
        keeps_epoch: Whether its selector remembers what it returned. Such a selector must not be rebuilt while it is in
            use, and refuses samples of more rows than it has.
        changeable: Names of the fields that may change in a live table, whose selectors get the new sampler by
            :meth:`~tdserve.rules.replay.samplers.selector.Selector.set_sampler`.
        uses_trajectories: Whether it uses trajectories. Then rows are committed in the order of their extends, and
            leave the table only when they are overwritten or deleted.
    """

    kind: ClassVar[str]
    uses_priority: ClassVar[bool] = False
    counts_samples: ClassVar[bool] = False
    adds: ClassVar[tuple[str, ...]] = ()
    is_independent: ClassVar[bool] = False
    draws_any_row: ClassVar[bool] = False
    is_ordered: ClassVar[bool] = False
    keeps_epoch: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()
    uses_trajectories: ClassVar[bool] = False

    @property
    def is_exact(self) -> bool:
        """Whether a sample has exactly as many rows as requested."""
        return True

    @property
    def trajectory_keys(self) -> tuple[tuple[str, ...], ...]:
        """Key of the rows, or none, by which a table tells the trajectories apart that the sampler uses; every row must
        have it."""
        return ()

    @property
    def marks_ends(self) -> bool:
        """Whether the key holds an end-of-trajectory flag. False: it holds a trajectory id."""
        return False

    def check(self, capacity: int) -> None:  # noqa: B027 (most refuse nothing)
        """Refuses a setting under which no sample could ever be drawn.

        Raises:
            InvalidRequestError: The setting is refused, with the reason.
        """

    def check_change(self, changed: Sampler) -> None:
        """Refuses a sampler that cannot replace this one in a live table.

        Raises:
            InvalidRequestError: It is another one, or differs in a field that cannot change. The error names it.
        """
        if type(changed) is not type(self):
            reason = f"{self!r} cannot become {changed!r}: a table keeps its kind of sampler"
            raise InvalidRequestError(argument="sampler", reason=reason)
        for name in (field.name for field in fields(self) if field.name not in self.changeable):  # type: ignore[arg-type]
            old, new = getattr(self, name), getattr(changed, name)
            if old != new:
                can = f"only {', '.join(self.changeable)} can" if self.changeable else "nothing of this sampler can"
                raise InvalidRequestError(argument=name, reason=f"it cannot change from {old!r} to {new!r}; {can}")

    @property
    def is_distinct(self) -> bool:
        """Whether a sample has no row twice."""
        return self.is_ordered or self.keeps_epoch

    def compute_unit(self, num_rows: int, capacity: int) -> int:
        """Returns how many rows of a sample of ``num_rows`` are drawn together at least; the sample has a whole number
        of these units. Errors as in the selector's draw."""
        return 1 if self.is_independent or self.is_distinct else num_rows

    def weigh_priorities(self, priorities: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Returns which parts of the selector's mass rows of these priorities have; None if that does not follow from
        their priorities."""
        return None

    def make_epoch_order(self, num_rows: int, epoch: int) -> EpochOrder | None:
        """Returns the order in which an epoch over a store visits each of its rows once; None if there is none.

        Args:
            num_rows: Rows of the store.
            epoch: Number of the epoch, from 0; each has an order of its own.
        """
        return None

    @abstractmethod
    def make_selector(self, columns: RowColumns, capacity: int) -> Selector:
        """Returns an empty selector; a table may have several of one sampler.

        For a table of very many rows this may run in a thread, and the rows are then added a piece at a time, between
        other calls of the selector.
        """


def make_epoch_order(sampler: Any, num_rows: int, *, epoch: int) -> EpochOrder:
    """Returns the order that a sampler defines for an epoch over a store; arguments as in the sampler's method.

    Args:
        sampler: None for the order of row numbers.

    Raises:
        InvalidRequestError: It is no sampler, or would draw rows twice, or leave some out.
    """
    epoch = check_integer("epoch", epoch, 0)
    order: EpochOrder | None = NumberOrder() if sampler is None else None
    if isinstance(sampler, Sampler):
        order = sampler.make_epoch_order(num_rows, epoch)
    if order is None:
        reason = f"{sampler!r} does not visit each row once; use Fifo or WithoutReplacement"
        raise InvalidRequestError(argument="sampler", reason=reason)
    return order


@dataclass(frozen=True)
class Uniform(Sampler):
    """Draws every row with the same probability, each draw independent of the others.

    So a sample may have a row twice, and may be larger than the table.
    """

    kind: ClassVar[str] = "uniform"
    is_independent: ClassVar[bool] = True
    draws_any_row: ClassVar[bool] = True

    def make_selector(self, columns: RowColumns, capacity: int) -> UniformSelector:
        """See :class:`Sampler`."""
        return UniformSelector(capacity)


class UniformSelector(Selector):
    """The selector of :class:`Uniform`; methods as in :class:`~tdserve.rules.replay.samplers.selector.Selector`."""

    def __init__(self, capacity: int) -> None:
        self._live = LiveRows(capacity)

    def __len__(self) -> int:
        return len(self._live)

    def __repr__(self) -> str:
        return f"<UniformSelector {self._live!r}>"

    def add(self, rows: Rows) -> None:
        """Adds rows.

        Raises:
            LocalProtocolError: A row is already a member or named twice. Nothing was changed.
        """
        self._live.add(rows)

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members."""
        self._live.remove(self._live.select_members(rows))

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Returns rows, each drawn on its own; None if there are none."""
        return Drawn(self._live.draw(rng, num_rows), {}) if self._live else None
