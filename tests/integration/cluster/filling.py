"""Rows of shared tables, and tables with a different number of them in each shard."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import tdserve

SIZES = (50, 20, 5)
"""Rows of the writers 0, 1 and 2."""


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Returns rows that show their number in every leaf."""
    number = torch.arange(start, start + num_rows)
    return TensorDict({"number": number, "wide": number[:, None].expand(-1, 30).float().contiguous()}, [num_rows])


def fill_unequally(table: Any, **annotations: Any) -> None:
    """Writes rows 0 to 74, a different number to each shard."""
    start = 0
    for writer, size in enumerate(SIZES):
        writers = (number for number in range(1, 1000) if table.choose_shard(number) == writer)
        given = {key: value[start : start + size] for key, value in annotations.items()}
        table.extend(rows(size, start), writer=next(writers), **given)
        start += size


def pick_one_of_each_shard(table: tdserve.ShardedReplayHandle) -> torch.Tensor:
    """Returns the number of a row of each shard."""
    return torch.arange(3) * table.part_capacity
