"""Tensors without memory that are given where numbers are read: they are refused, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS = 4


def free(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory is freed, as FSDP frees parameters."""
    tensor.untyped_storage().resize_(0)
    return tensor


def rows(**leaves: Any) -> TensorDict:
    """Some rows."""
    return TensorDict({"a": torch.zeros(NUM_ROWS), **leaves}, [NUM_ROWS])


def append(table: Any, priority: torch.Tensor) -> None:
    """Appends a row."""
    with table.writer() as writer:
        writer.append(rows()[0], priority=priority)


FREED: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], object]] = {
    "priority": lambda table, numbers, floats: table.update_priority(torch.arange(NUM_ROWS), floats),
    "priority of rows": lambda table, numbers, floats: table.update_priority(numbers, 1.0),
    "priority at extend": lambda table, numbers, floats: table.extend(rows(), priority=floats),
    "priority at append": lambda table, numbers, floats: append(table, free(torch.tensor(1.0))),
    "ends": lambda table, numbers, floats: table.extend(rows(), ends=free(torch.ones(NUM_ROWS, dtype=torch.bool))),
    "generation": lambda table, numbers, floats: table.update_priority(torch.arange(NUM_ROWS), 1.0, generation=numbers),
    "index": lambda table, numbers, floats: table[numbers],
    "index of a leaf": lambda table, numbers, floats: table.get_at("a", numbers),
    "rows to delete": lambda table, numbers, floats: table.delete(numbers),
    "rows to write": lambda table, numbers, floats: table.set_at_("a", 1.0, numbers),
}


@pytest.mark.parametrize("given", FREED)
def test_table_when_numbers_are_in_freed_memory_then_refused(client: tdserve.Client, name: str, given: str) -> None:
    table = client.create_replay(name, rows()[0], 16, sampler=tdserve.Prioritized(alpha=1.0, beta=1.0))
    table.extend(rows())
    numbers, floats = free(torch.arange(NUM_ROWS)), free(torch.ones(NUM_ROWS))
    with pytest.raises((tdserve.NotSupportedError, tdserve.SelectionError), match="memory was freed"):
        FREED[given](table, numbers, floats)
    assert len(table) == NUM_ROWS
    assert table.get_priorities(torch.arange(NUM_ROWS)).tolist() == [1.0] * NUM_ROWS


def test_store_when_index_is_in_freed_memory_then_refused(client: tdserve.Client, name: str) -> None:
    client.init_remote(rows(), name)
    for index in (free(torch.arange(NUM_ROWS)), (free(torch.arange(2)),), free(torch.ones(NUM_ROWS, dtype=torch.bool))):
        with pytest.raises((tdserve.NotSupportedError, tdserve.SelectionError), match="memory was freed"):
            client[name].__getitem__(index)
        with pytest.raises((tdserve.NotSupportedError, tdserve.SelectionError), match="memory was freed"):
            client[name].set_at_("a", 1.0, index)
    assert client[name]["a"].tolist() == [0.0] * NUM_ROWS
