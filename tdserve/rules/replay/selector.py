"""What a sampler needs at run time: the rows that a sample may draw, and the draw itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tdserve.rules.replay.live_rows import Rows


class Drawn(NamedTuple):
    """What a draw gives.

    Attributes:
        rows: Row numbers, in the order of the result.
        columns: What the sampler knows of each of them, by the key that readers see (``"probability"``), of the length
            of ``rows``; ``"slice_end"`` is for the reader's end alone.
    """

    rows: Rows
    columns: dict[str, NDArray[Any]]


class Selector(Protocol):
    """The rows of a table that may be drawn now. Every operation is vectorised over the rows it is given."""

    def __len__(self) -> int:
        """Members."""

    def add(self, rows: Rows) -> None:
        """Takes rows in, each once and none a member; their columns are written already."""

    def remove(self, rows: Rows) -> None:
        """Drops rows, each named once; those that are no members are ignored."""

    def update(self, rows: Rows) -> None:
        """The priorities of these rows, each named once, have changed; those that are no members are ignored."""

    def draw(self, num_rows: int, *, rng: np.random.Generator) -> Drawn | None:
        """Chooses ``num_rows`` rows, at least 1; None when that has to wait for other rows.

        Raises:
            InvalidRequestError: No state of this table could ever give so many. Nothing was changed.
        """
