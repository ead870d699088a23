"""``set_at_(..., return_early=True)``: of a store, of a view, of tables."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

NUM_ROWS = 4


def rows() -> TensorDict:
    """Rows with their numbers, and text."""
    return TensorDict({"v": torch.arange(NUM_ROWS), "text": ["none"] * NUM_ROWS}, [NUM_ROWS])


def make(client: tdserve.Client, name: str, kind: str) -> Any:
    """A handle of one of the kinds that have ``set_at_``; each has the rows 0 to 3."""
    if kind == "store":
        return client.memmap(rows(), name)
    if kind == "view":
        return client.memmap(rows(), name).select("v", "text")
    table: Any = client.create_replay(name, rows()[0], NUM_ROWS)
    if kind == "queue":
        table = client.create_queue(f"{name}-q", rows()[0], max_size=NUM_ROWS)
    table.extend(rows())
    return table


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["store", "view", "replay", "queue"])
def test_set_at_when_it_returns_early_then_a_future_ends_when_it_is_written(
    client: tdserve.Client, name: str, kind: str
) -> None:
    handle = make(client, name, kind)
    written = [handle.set_at_("v", torch.tensor([10 + row]), [row], return_early=True) for row in range(NUM_ROWS)]
    assert all(isinstance(each, Future) for each in written)
    assert {each.result(20.0) for each in written} == {handle if kind in ("store", "view") else None}
    handle.set_at_("text", ["a", "b"], [1, 3], return_early=True).result(20.0)
    assert handle[:]["v"].tolist() == [10, 11, 12, 13]
    assert list(handle[:]["text"]) == ["none", "a", "none", "b"]
    failing = handle.set_at_("v", torch.zeros(2, 7), [0, 1], return_early=True)
    assert isinstance(failing.exception(20.0), tdserve.SpecMismatchError)
    with pytest.raises(tdserve.InvalidRequestError):  # a value that no write takes is refused at once
        handle.set_at_(7, torch.zeros(2), [0, 1], return_early=True)
    if kind == "queue":
        client.delete(f"{name}-q")
