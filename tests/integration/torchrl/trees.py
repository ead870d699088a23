"""Segment trees in Python for TorchRL's ``PrioritizedSampler``, whose compiled ones do not load under every torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SumTree:
    """An array with the methods of a sum tree."""

    neutral = 0.0

    def __init__(self, size: int) -> None:
        self.values = np.full(size, self.neutral, np.float64)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[np.asarray(index)] = np.asarray(value)

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(self.values[np.asarray(index)], dtype=torch.float32)

    def query(self, begin: int, end: int) -> float:
        """Returns the sum of a part."""
        return float(self.values[begin:end].sum())

    def scan_lower_bound(self, mass: Any) -> Any:
        """Returns the first places up to which the sums are above these."""
        return torch.from_numpy(np.searchsorted(self.values.cumsum(), np.asarray(mass), side="right"))


class MinTree(SumTree):
    """An array with the methods of a minimum tree."""

    neutral = np.inf

    def query(self, begin: int, end: int) -> float:
        """Returns the least of a part."""
        return float(self.values[begin:end].min())
