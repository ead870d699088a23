"""Rows of several shards as those of one store: whether their numbers are in range, and the rows joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tdserve.base.errors import SelectionError


def check_range(numbers: NDArray[np.int64], num_rows: int, store: str) -> None:
    """Raises SelectionError, for a store described so, if a row number is out of range."""
    bad = numbers[(numbers < 0) | (numbers >= num_rows)]
    if len(bad):
        raise SelectionError(selection=str(int(bad[0])), reason=f"{store} has rows 0 to {num_rows - 1}")


def join_rows(parts: Sequence[Any]) -> Any:
    """Joins tensordicts of rows, or leaves of rows, along their first dimension."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor) and parts[0].is_nested:  # which torch alone does not join
        columns: list[Any] = [TensorDict({"rows": part}, [part.size(0)]) for part in parts]
        return join_rows(columns).get("rows")
    return torch.cat(list(parts))
