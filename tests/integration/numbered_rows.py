"""Rows that hold their own numbers, in a way that shows whether they are whole."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

SMALL, LARGE = 3, 20_000
"""Elements of a row: a few of them ride in messages, or go over the data transport."""


def rows(*numbers: int, size: int = SMALL) -> TensorDict:
    """Returns rows that hold their own numbers."""
    number = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict({"number": number, "body": number[:, None].expand(-1, size).contiguous()}, [len(numbers)])


def numbers(td: Any) -> list[int]:
    """Returns the number of each row; fails if a row is not whole."""
    assert (td["body"] == td["number"][:, None]).all()
    found: list[int] = td["number"].tolist()
    return found
