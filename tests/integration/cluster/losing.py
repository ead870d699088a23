"""Shared stores with rows in each part, and clients of servers that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDict

import tdserve
from tests.integration.crashing import Crashing


def join_addresses(crashing: list[Crashing]) -> str:
    """Returns the address of all servers."""
    return ",".join(each.server.address for each in crashing)


@contextmanager
def connecting(crashing: list[Crashing], timeout_s: float = 30.0) -> Iterator[tdserve.ClusterClient]:
    """A client of all of them."""
    with tdserve.connect(join_addresses(crashing), timeout_s=timeout_s) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Returns rows that have numbers."""
    return TensorDict({"number": torch.arange(start, start + num_rows)}, [num_rows])


def fill_each(table: tdserve.ShardedReplayHandle | tdserve.ShardedQueueHandle) -> list[int]:
    """Writes ten rows to each shard; returns the number of a writer of each."""
    writers = [next(each for each in range(1, 1000) if table.choose_shard(each) == shard) for shard in range(3)]
    for shard, writer in enumerate(writers):
        table.extend(rows(10, 10 * shard), writer=writer)
    return writers
