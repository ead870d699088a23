"""Columns that control keeps of each row beside its generation, so that rules can decide without reading content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MakeColumn = Callable[[str, "np.dtype[Any]", tuple[int, ...]], NDArray[Any]]
"""Returns the array of a column by name, dtype and shape: zeros at first, its old content after a restart."""


def make_in_memory(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns a column in memory, which ends with the process."""
    return np.zeros(shape, dtype)


class RowColumns:
    """Arrays of one entry per row, made when they are first needed; the owner of the table decides where they lie.

    Rows that were never written have zeros. Entries of a row count from its commit on.

    Args:
        capacity: Number of rows.
        make: Returns the arrays.

    Attributes:
        trajectories: The table's ``Trajectories``, which link its rows; None if its sampler needs none.
    """

    def __init__(self, capacity: int, make: MakeColumn = make_in_memory) -> None:
        self.capacity = capacity
        self.trajectories: Any = None
        self._make = make
        self._arrays: dict[str, NDArray[Any]] = {}

    @property
    def sequence(self) -> NDArray[np.int64]:
        """Place of the row's commit in the table, see :mod:`tdserve.rules.replay.row_indexes.row_order`: greater is
        newer."""
        return self.get_array("sequence", np.int64)

    @property
    def priority(self) -> NDArray[np.float64]:
        """Priority as given, at least 0."""
        return self.get_array("priority", np.float64)

    @property
    def times_sampled(self) -> NDArray[np.int64]:
        """How often the row was sampled."""
        return self.get_array("times_sampled", np.int64)

    @property
    def previous(self) -> NDArray[np.int64]:
        """One more than the number of the previous row in the same trajectory; 0: there is none."""
        return self.get_array("previous", np.int64)

    @property
    def is_end(self) -> NDArray[np.bool_]:
        """Whether a row is the last of its trajectory."""
        return self.get_array("is_end", np.bool_)

    def get_array(self, name: str, dtype: Any, width: int = 0) -> NDArray[Any]:
        """Returns a column by name: ``[capacity]``, or ``[capacity, width]``."""
        found = self._arrays.get(name)
        if found is None:
            shape = (self.capacity, width) if width else (self.capacity,)
            found = self._arrays[name] = self._make(name, np.dtype(dtype), shape)
        return found
