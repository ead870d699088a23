"""Rows that differ in length, as a jagged tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def make_nested_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns tensors of one dtype that differ in shape as a nested tensor: a jagged one if only their lengths do."""
    is_jagged = len({row.shape[1:] for row in rows}) == 1 and all(row.ndim for row in rows)
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged if is_jagged else torch.strided)


def make_ragged(rows: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> torch.Tensor:
    """Returns one-dimensional arrays of a dtype as a jagged tensor."""
    values = torch.from_numpy(np.concatenate([*rows, np.empty(0, dtype)]).astype(dtype.newbyteorder("="), copy=False))
    # nested_tensor_from_jagged imports torch's compiler, which takes half a second and warns.
    return torch.nested.nested_tensor(list(torch.split(values, [len(row) for row in rows])), layout=torch.jagged)
