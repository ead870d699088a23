"""Divisions of a store among servers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict

from tdserve.client.cluster.stores.divisions import DatasetDivision, KeyDivision, TableDivision
from tdserve.client.session.catalog.description import StoreDescription, from_message
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.placement import PlacementRecord
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2


def describe() -> StoreDescription:
    """A part, of which each test sets what it compares."""
    return from_message(
        control_pb2.StoreDescription(spec=codec.encode(capture(TensorDict({"a": torch.zeros(4)}, [4])).spec))
    )


def test_table_when_divided_then_each_shard_has_as_many_rows() -> None:
    division = TableDivision(10)
    assert [division.get_first_row(shard) for shard in range(3)] == [0, 10, 20]
    assert division.is_valid_part(2, replace(describe(), capacity=10))
    assert not division.is_valid_part(2, replace(describe(), capacity=11))


@pytest.mark.parametrize(("num_rows", "num_shards"), [(10, 3), (3, 3), (2, 3), (1000, 7)])
def test_dataset_when_divided_then_blocks_are_consecutive_and_differ_by_a_row_at_most(
    num_rows: int, num_shards: int
) -> None:
    division = DatasetDivision(PlacementRecord("dataset", tuple(range(num_shards)), capacity=num_rows))
    bounds = [division.get_first_row(shard) for shard in range(num_shards)] + [num_rows]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert bounds[0] == 0
    assert max(sizes) - min(sizes) <= 1
    for shard, size in enumerate(sizes):
        assert division.is_valid_part(shard, replace(describe(), batch_size=(size, 4)))
        assert not division.has_rows(shard, (size + 1, 4))


def test_keys_when_a_part_is_of_another_number_of_shards_then_it_does_not_fit() -> None:
    division = KeyDivision(3)
    parts = [replace(describe(), settings=KeyedSettings(num_shards=each).to_json()) for each in (0, 2, 3)]
    assert [division.is_valid_part(1, part) for part in parts] == [False, False, True]
