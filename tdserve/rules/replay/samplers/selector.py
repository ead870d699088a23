"""Selectors: the rows that a sample may draw, and the draw itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.row_numbers import Rows


class Drawn(NamedTuple):
    """The result of a draw.

    Attributes:
        rows: Row numbers, in the order of the result.
        columns: Columns that the sampler adds, by the key that readers see (``"probability"``), of the length of
            ``rows``; ``"slice_end"`` is for the reader's end alone.
    """

    rows: Rows
    columns: dict[str, NDArray[Any]]


class Preparation(Protocol):
    """Work of a selector over all rows before it can draw samples of a new size. Other calls may do anything meanwhile.

    Attributes:
        dropped: What it has made superfluous, for a thread to free it.
    """

    dropped: list[Any]

    def search(self) -> None:
        """Does the work that takes long; meant for a thread."""

    def finish_in_pieces(self) -> Iterator[None]:
        """Finishes it, a piece at a time, by what has changed since it began."""


def check_distinct(num_rows: int, capacity: int) -> None:
    """Refuses a sample of more different rows than a table may ever have.

    Raises:
        InvalidRequestError: There are too many. Nothing was changed.
    """
    if num_rows > capacity:
        reason = f"{num_rows} different rows never fit into a capacity of {capacity}"
        raise InvalidRequestError(argument="num_rows", reason=reason)


class Selector(ABC):
    """The rows of a table that may be drawn now. Every operation is vectorised over its rows.

    For a table of very many rows, rows are added to a new selector a piece at a time, between other calls.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of members."""

    @abstractmethod
    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member; their columns are already written."""

    @abstractmethod
    def remove(self, rows: Rows) -> None:
        """Removes rows, each named once; rows that are not members are ignored."""

    def update(self, rows: Rows) -> None:  # noqa: B027 (priorities matter to few)
        """Notes that the priorities of these rows, each named once, have changed; rows that are not members are
        ignored."""

    def set_sampler(self, sampler: Any) -> None:  # noqa: B027 (most samplers have nothing that changes)
        """Draws as this sampler from now on, which differs from the one before only in its ``changeable`` fields."""

    def explain_none(self) -> str:
        """Returns why none of the members is drawn, for an error; "" if some are, or there are none."""
        return ""

    @property
    def num_drawable(self) -> int:
        """Rows that samples can have before one comes again; fewer than the members if only whole groups are drawn."""
        return len(self)

    @property
    def mass(self) -> float:
        """What the probabilities of its draws are shares of: of two tables whose masses are known, a sample of both
        draws from each in proportion."""
        return float(len(self))

    def compute_mass(self, num_rows: int) -> float:
        """Returns the mass for samples of this many rows, if it depends on that. Errors as in :meth:`draw`."""
        return self.mass

    @property
    def least_mass(self) -> float:
        """The part of the mass that its least likely row has."""
        return 1.0

    @property
    def num_epochs(self) -> int:
        """Passes over all rows that it has begun, if it makes such; its mass is then what is left of the last."""
        return 0

    @property
    def longest_slice(self) -> int:
        """Rows that follow each other in the longest slice it draws; 1: it draws no slices."""
        return 1

    def is_unprepared(self, num_rows: int) -> bool:
        """Returns whether a sample of this many rows costs a pass over the table, unless :meth:`prepare` is called."""
        return False

    def prepare(self, num_rows: int) -> Preparation | None:
        """Begins to prepare for samples of this many rows; returns None if it does not lack anything for them. Of
        several preparations only the last counts."""
        return None

    @abstractmethod
    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Chooses ``num_rows`` rows, at least 1; None if that has to wait for other rows.

        A large sample is drawn a part at a time. Rows may come and go in between; if its rows must differ from each
        other, the parts follow each other without another draw in between, and should differ too.

        Args:
            num_rows: Rows of this part.
            rng: Source of randomness.
            num_drawn: Rows that were drawn for the parts before it.
            num_total: Rows of the whole sample; 0: this is all of it.

        Raises:
            InvalidRequestError: No state of this table could ever give that many. Nothing was changed.
        """
