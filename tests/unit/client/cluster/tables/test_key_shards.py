"""The shards of rows that choose them by a key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client.cluster.tables.key_shards import KeyShards
from tdserve.structure.captures.capture import capture

NUM_SHARDS = 1 << 20
"""So many that two values hardly have the same one."""


def make_shards(value: Any) -> KeyShards:
    """Returns the object that chooses shards by a key like this value."""
    row = TensorDict({"number": torch.tensor(0), "key": value}, [])
    return KeyShards(("key",), capture(row, store="rows").spec, NUM_SHARDS)


@pytest.mark.parametrize(
    ("given", "plain"),
    [(np.str_("a"), "a"), (np.int64(3), 3), (np.bool_(True), True), (np.float64(0.5), 0.5), (-0.0, 0.0)],
)
def test_value_when_given_as_an_equal_one_then_has_the_same_shard(given: Any, plain: Any) -> None:
    shards = make_shards(NonTensorData(plain))
    assert shards.choose_one({"key": given}) == shards.choose_one({"key": plain})
    rows = TensorDict({"number": torch.arange(2), "key": NonTensorStack(given, plain)}, [2])
    assert len(set(shards.choose(rows).tolist())) == 1


def test_zero_when_negative_in_a_tensor_then_has_the_shard_of_zero() -> None:
    shards = make_shards(torch.tensor(0.0))
    rows = TensorDict({"number": torch.arange(2), "key": torch.tensor([0.0, -0.0])}, [2])
    assert len(set(shards.choose(rows).tolist())) == 1


def test_key_when_a_column_of_a_larger_tensor_then_has_the_shard_of_its_copy() -> None:
    shards, column = make_shards(torch.tensor([0])), torch.tensor([[1, 2]])[:, 0]
    assert shards.choose_one({"key": column}) == shards.choose_one({"key": column.clone()})
