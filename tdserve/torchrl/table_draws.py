"""What the samplers of a table share: whether the server draws, and its draws."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.samplers.random import RandomSampler

from tdserve.base.errors import SelectionError
from tdserve.client.tables.row_arguments import to_row_numbers
from tdserve.messages.content import GENERATION_KEY
from tdserve.torchrl.table_rows import from_table, split_sample


def draw_rows(
    storage: Any, num_rows: int, *, timeout_s: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Draws rows by the table's sampler and holds them for the buffer, which asks for them next.

    Returns:
        Their numbers, the columns that the table has added, and the rows.
    """
    table = storage.require_table()
    sample = table.sample(num_rows, timeout_s=timeout_s)
    index, added, rows = split_sample(sample, table.spec.root.tensorclass)
    storage.hold(index, rows, added[GENERATION_KEY])
    return index, added, rows


def may_draw(storage: Any) -> bool:
    """Returns whether there are rows to draw, or a limiter waits for them."""
    table = storage.table
    return table is not None and (storage.waits or table.counts().rows > 0 or len(table) > 0)


def has_rule(storage: Any, sampler: Any) -> bool:
    """Returns whether the table has the sampler that this one of TorchRL stands for."""
    table = storage.require_table()
    rule = sampler.choose_rule(storage.list_keys())
    return rule is not None and table.settings.sampler == rule


def hold_local_draw(storage: Any, index: torch.Tensor) -> bool:
    """Reads and holds the rows that were drawn in this process; returns whether all of them were live.

    TorchRL draws numbers below the length. After rows were deleted, others may be live.
    """
    try:
        rows, generations = storage.require_table().read_with_generations(to_row_numbers(index))
    except SelectionError:
        return False
    storage.hold(index, from_table(rows), generations)
    return True


def raise_empty(storage: Any, batch_size: int) -> None:
    """Raises TorchRL's error for an empty storage."""
    RandomSampler().sample(storage, batch_size)
