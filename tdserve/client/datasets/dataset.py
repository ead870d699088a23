"""Handles and views as datasets: whole batches for a ``DataLoader``, rows one by one, epochs divided among readers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import get_worker_info

from tdserve.base.errors import InvalidRequestError
from tdserve.client.datasets.worker_pool import get_worker_pool
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.content import INDEX_KEY
from tdserve.structure.trees.tree import Path

BLOCK_ROWS = 1024
BLOCK_NBYTES = 1 << 20
"""Size of the rows that an iteration reads together; a row that the user keeps holds all of them in memory."""

FIRST_BLOCK_ROWS = 16
"""The first block is small, for those who look only at the first rows; each block is twice as large as the last."""


def read_into_shared_memory(client: SessionClient) -> None:
    """Makes later reads use shared memory in a worker of a ``DataLoader``; has no effect anywhere else.

    The main process takes what is there without a copy.
    """
    if get_worker_info() is not None and not client.pool.is_shared:
        client.pool = get_worker_pool()


def check_index_free(name: str, keys: Container[str | Path]) -> None:
    """Raises InvalidRequestError if the rows of a store have a key where batches would have their numbers."""
    if INDEX_KEY in keys:
        reason = f"the rows of {name!r} have a key {INDEX_KEY!r} of their own"
        raise InvalidRequestError(argument="with_index", reason=reason)


def add_index(td: Any, rows: Any) -> Any:
    """Adds the numbers of rows, given as a slice or an array, to a batch of them."""
    if not isinstance(td, TensorDictBase):
        raise InvalidRequestError(argument="with_index", reason=f"a {type(td).__name__} accepts no further keys")
    numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.from_numpy(rows)
    numbers = numbers.reshape(-1, *[1] * (td.ndim - 1)).expand(td.batch_size).clone()
    if not td.is_locked:
        return td.set(INDEX_KEY, numbers)
    return td.unlock_().set(INDEX_KEY, numbers).lock_()


def iter_rows(read: Callable[[slice], Any], num_rows: int, nbytes: int, *, end: int | None = None) -> Iterator[Any]:
    """Yields rows of a store or view one by one, read in blocks.

    Args:
        read: Reads the rows whose numbers are in a slice; some numbers may have none.
        num_rows: How many there are. If some come in the meantime behind them, these are yielded too.
        nbytes: Size of all of them.
        end: Number behind the last one that there may be. None: ``num_rows``, and every number has its row.
    """
    end = num_rows if end is None else end
    most = max(1, min(BLOCK_ROWS, BLOCK_NBYTES * num_rows // max(nbytes, 1)))
    start, num_numbers, num_found, num_missing = 0, min(FIRST_BLOCK_ROWS, most), 0, num_rows
    while start < end and (num_missing > 0 or num_found > 0):
        block = read(slice(start, min(start + num_numbers, end)))
        yield from block
        num_found = len(block)
        num_missing -= num_found
        start += num_numbers
        num_numbers = min(2 * num_numbers, most)
