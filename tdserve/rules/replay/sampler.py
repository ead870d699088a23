"""How a sample's rows are chosen among those that may be drawn. A sampler is a setting; its selector does the work.

A new sampler is a class in a module of its own and an entry in ``RULES`` of :mod:`tdserve.rules.replay.settings`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tdserve.rules.replay.columns import Columns
from tdserve.rules.replay.live_rows import LiveRows, Rows
from tdserve.rules.replay.selector import Drawn, Selector


class Sampler(ABC):
    """What every sampler has: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name there.
        columns: Names of the columns that a table keeps for it.
        adds: Keys of ``ADDED_DTYPES`` that a sample has beside its rows, see :class:`Drawn`.
        is_independent: Whether each row is drawn by itself, so that several batches may be drawn as one.
        is_ordered: Whether the order of a sample's rows means something.
        keeps_epoch: Whether its selector remembers what it gave. Such a one must not be built again while it is in use,
            and refuses samples of more rows than it has.
        uses_trajectories: Whether it looks at trajectories. Rows are committed in the order of their extends then, and
            leave the table only when they are overwritten or deleted.
    """

    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()
    is_independent: ClassVar[bool] = False
    is_ordered: ClassVar[bool] = False
    keeps_epoch: ClassVar[bool] = False
    uses_trajectories: ClassVar[bool] = False

    @property
    def is_exact(self) -> bool:
        """Whether a sample has as many rows as were asked for."""
        return True

    @property
    def rule_keys(self) -> tuple[tuple[str, ...], ...]:
        """Keys of the rows that it looks at."""
        return ()

    @property
    def marks_ends(self) -> bool:
        """Whether the rows hold at these keys if a trajectory ends there, and not to which trajectory they belong."""
        return False

    def check(self, capacity: int) -> None:  # noqa: B027 (most refuse nothing)
        """Refuses a setting under which no sample could ever be drawn.

        Raises:
            InvalidRequestError: As said, with the reason.
        """

    @abstractmethod
    def selector(self, columns: Columns, capacity: int) -> Selector:
        """An empty set of rows to draw from; a table may have several of one sampler."""


@dataclass(frozen=True)
class Uniform(Sampler):
    """Every row with the same probability, each draw independent of the others.

    So a sample may hold a row twice, and may be larger than the table.
    """

    kind: ClassVar[str] = "uniform"
    is_independent: ClassVar[bool] = True

    def selector(self, columns: Columns, capacity: int) -> UniformSelector:
        """As of :class:`Sampler`."""
        return UniformSelector(capacity)


class UniformSelector:
    """The selector of :class:`Uniform`; methods as of :class:`~tdserve.rules.replay.selector.Selector`."""

    def __init__(self, capacity: int) -> None:
        self._live = LiveRows(capacity)

    def __len__(self) -> int:
        return len(self._live)

    def __repr__(self) -> str:
        return f"<UniformSelector {self._live!r}>"

    def add(self, rows: Rows) -> None:
        """Takes rows in.

        Raises:
            LocalProtocolError: A row is a member already or named twice. Nothing was changed.
        """
        self._live.add(rows)

    def remove(self, rows: Rows) -> None:
        """Drops those rows that are members."""
        self._live.remove(self._live.members_of(rows))

    def update(self, rows: Rows) -> None:
        """Priorities mean nothing here."""

    def draw(self, num_rows: int, *, rng: np.random.Generator) -> Drawn | None:
        """Rows, each drawn by itself; None while there is none."""
        return Drawn(self._live.draw(rng, num_rows), {}) if self._live else None
