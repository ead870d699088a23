"""How a sample's rows are chosen among the live ones. A sampler is a setting; drawing is its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tdserve.replay.live_rows import LiveRows, Rows


@dataclass(frozen=True)
class Uniform:
    """Every live row with the same probability, each draw independent of the others.

    So a sample may hold a row twice, and may be larger than the table.
    """

    kind: ClassVar[str] = "uniform"

    def draw(self, live_rows: LiveRows, num_rows: int, *, rng: np.random.Generator) -> Rows:
        """Row numbers; there must be a live row."""
        return live_rows.draw(rng, num_rows)


Sampler = Uniform
"""Every sampler there is: one is a frozen dataclass with ``kind`` and ``draw``."""
