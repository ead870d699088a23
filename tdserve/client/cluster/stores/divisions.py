"""Divisions of a store among the servers that share it: which rows or keys each part has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.placement import PlacementRecord


class StoreDivision(Protocol):
    """How a store is divided."""

    def get_first_row(self, shard: int) -> int:
        """Returns the number of a part's first row in the whole store; 0 where rows have no numbers."""

    def is_valid_part(self, shard: int, part: StoreDescription) -> bool:
        """Returns whether a part has the rows or keys that this division gives it."""

    def bind(self, handle: Any) -> None:
        """Keeps the handle of a part from following a store that another division has."""


class TableDivision:
    """Each part of a table has as many rows as any other: row ``number`` is in shard ``number // part_capacity``.

    Attributes:
        part_capacity: Rows of each part.
    """

    def __init__(self, part_capacity: int) -> None:
        self.part_capacity = part_capacity

    def get_first_row(self, shard: int) -> int:
        """See ``StoreDivision``."""
        return shard * self.part_capacity

    def is_valid_part(self, shard: int, part: StoreDescription) -> bool:
        """See ``StoreDivision``."""
        return part.capacity == self.part_capacity

    def bind(self, handle: Any) -> None:
        """See ``StoreDivision``."""
        handle.is_part = True


class KeyDivision:
    """Each key is in the shard of its hash.

    Args:
        num_shards: Number of parts.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def get_first_row(self, shard: int) -> int:
        """See ``StoreDivision``."""
        return 0

    def is_valid_part(self, shard: int, part: StoreDescription) -> bool:
        """See ``StoreDivision``."""
        return KeyedSettings.from_json(part.settings).num_shards == self._num_shards

    def bind(self, handle: Any) -> None:
        """See ``StoreDivision``: what keys have needs no more than ``fits``."""


class DatasetDivision:
    """Each part of a dataset has consecutive rows; parts differ by a row at most.

    Attributes:
        bounds: The first row of each part, and the number of all rows.
    """

    def __init__(self, placement: PlacementRecord) -> None:
        self.bounds = np.arange(placement.num_shards + 1) * placement.capacity // placement.num_shards

    def get_first_row(self, shard: int) -> int:
        """See ``StoreDivision``."""
        return int(self.bounds[shard])

    def is_valid_part(self, shard: int, part: StoreDescription) -> bool:
        """See ``StoreDivision``."""
        return self.has_rows(shard, part.batch_size)

    def has_rows(self, shard: int, batch_size: Sequence[int]) -> bool:
        """Returns whether a part of this batch size has as many rows as this division gives it."""
        return batch_size[:1] == (self.bounds[shard + 1] - self.bounds[shard],)

    def bind(self, handle: Any) -> None:
        """See ``StoreDivision``: each call compares the rows of the handle."""
