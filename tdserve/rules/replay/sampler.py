"""How a sample's rows are chosen among those that may be drawn. A sampler is a setting; its selector does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tdserve.rules.replay.columns import Columns
from tdserve.rules.replay.live_rows import LiveRows, Rows
from tdserve.rules.replay.selector import Drawn, Selector


class Sampler(Protocol):
    """What every sampler has: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name there.
        columns: Names of the columns that its selectors read.
    """

    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def check(self, capacity: int) -> None:
        """Refuses a setting under which no sample could ever be drawn.

        Raises:
            InvalidRequestError: As said, with the reason.
        """

    def selector(self, columns: Columns, capacity: int) -> Selector:
        """An empty set of rows to draw from; a table may have several of one sampler."""


@dataclass(frozen=True)
class Uniform:
    """Every row with the same probability, each draw independent of the others.

    So a sample may hold a row twice, and may be larger than the table.
    """

    kind: ClassVar[str] = "uniform"
    columns: ClassVar[tuple[str, ...]] = ()

    def check(self, capacity: int) -> None:
        """There is nothing to refuse."""

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
