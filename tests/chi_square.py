"""Whether counted draws fit the probabilities that they should have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def statistic(counts: NDArray[np.int64], probabilities: NDArray[np.float64] | None = None) -> float:
    """Returns how far counts are from those that probabilities predict; without probabilities, all are equally
    likely."""
    expected = counts.sum() * (np.full(counts.size, 1 / counts.size) if probabilities is None else probabilities)
    return float(((counts - expected) ** 2 / expected).sum())


def limit(num_cells: int) -> float:
    """The statistic that a fair source exceeds once in about ten million times (Wilson and Hilferty)."""
    freedom = num_cells - 1
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 5.199 * part**0.5) ** 3)
