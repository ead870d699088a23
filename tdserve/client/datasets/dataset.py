"""Handles and views as datasets: whole batches for a ``DataLoader``, rows one by one, epochs divided among readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import get_worker_info

from tdserve.base.errors import InvalidRequestError, WrongStateError
from tdserve.base.integers import check_integer
from tdserve.client.content.devices import resolve_device
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.padding import Pad
from tdserve.client.datasets.epoch_batches import EpochBatches, EpochPlan
from tdserve.client.datasets.worker_pool import worker_pool
from tdserve.client.session.calls import SessionClient
from tdserve.messages.selection.selection import encode
from tdserve.rules.replay.epochs import epoch_order, share_of
from tdserve.structure.tree import Spec

INDEX_KEY = "index"
"""Key that ``with_index`` adds, the same as in samples."""

BLOCK_ROWS = 1024
BLOCK_NBYTES = 1 << 20
"""Of rows that are read together for an iteration; a single row that the user keeps keeps all of them in memory."""

FIRST_BLOCK_ROWS = 16
"""The first block is small, for those who look only at the first rows; each block is twice as large as the last."""


class _DatasetRows:
    """The part that all datasets share."""

    if TYPE_CHECKING:
        name: str
        spec: Spec
        _client: SessionClient

        def __getitem__(self, index: Any) -> Any: ...

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads a whole batch in one call, as a ``DataLoader`` does: ``store[indices]``.

        In a worker of a ``DataLoader`` it is in shared memory, from where the main process takes it without a copy.
        """
        self.read_into_shared_memory()
        return self[list(indices)]

    def read_into_shared_memory(self) -> None:
        """Makes later reads use shared memory in a worker of a ``DataLoader``; has no effect anywhere else."""
        if get_worker_info() is not None and not self._client.pool.is_shared:
            self._client.pool = worker_pool()


class Epochs:
    """Rows that can be divided among readers."""

    if TYPE_CHECKING:
        name: str
        spec: Spec

    @property
    def _what(self) -> str:
        """Names the rows, for messages."""
        return f"store {self.name!r}"

    def _read_batch(self, rows: Any, pad: Pad, timeout_s: float | None) -> Any:
        """Reads rows of everything, by a slice or an array of numbers."""
        raise NotImplementedError

    def batches(
        self,
        num_rows: int,
        *,
        sampler: Any = None,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        start: int = 0,
        prefetch: int = 4,
        with_index: bool = False,
        device: Any = None,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> EpochBatches:
        """Returns an iterator over one reader's part of an epoch, which reads ahead while the caller works.

        ``world_size`` readers with the same arguments except ``rank`` see each row exactly once, whatever the numbers
        of rows and readers are: nothing is padded, and no row is repeated. The order is computed here, from the
        sampler's seed, the epoch and the number of rows. The server keeps nothing, so that any store can be used, even
        a read-only one; a view has the rows and keys that it shows. If rows do not divide evenly, some readers get one
        row more than others, and perhaps one batch more; ``drop_last`` gives all of them the same number of full
        batches.

        Each batch is as of the moment when it is read, which is before it is returned.

        Args:
            num_rows: Rows of each batch; the last one has the rest.
            sampler: ``tdserve.WithoutReplacement(seed=)`` for a random order, which differs by seed and epoch; None or
                ``tdserve.Fifo()`` for the rows as they are numbered.
            epoch: At least 0; for the next one, call again.
            rank: Of this reader, from 0.
            world_size: Number of readers.
            drop_last: Leaves out batches that only some readers would have, and those that are not full.
            start: Batches that this reader has had before; goes on after them.
            prefetch: Batches under way or waiting, at most.
            with_index: Adds the row numbers under ``"index"``, int64 ``[num_rows, *others]`` with the other
                batch dimensions; in a view the numbers of its own rows.
            device: Where batches are moved.
            pad: Pads ragged tensors to the longest of the batch, as of ``get``.
            timeout_s: Seconds that one batch may take; after that ``next`` raises, and the next call returns the same
                batch.

        Returns:
            An iterator with a ``len``, over plain tensordicts (or the stored class); a context manager.

        Raises:
            InvalidRequestError: An argument is invalid, or the sampler has no order that visits each row once.
            WrongStateError: The store, or view, has no batch dimension.
        """
        check_real("reading a store")
        num_rows = check_integer("num_rows", num_rows, 1)
        prefetch = check_integer("prefetch", prefetch, 1)
        start = check_integer("start", start, 0)
        batch_size = self.spec.batch_size
        if not batch_size:
            raise WrongStateError(state=f"{self._what} has no batch dimension", event="batches()")
        keys = self.spec.keys()
        if with_index and INDEX_KEY in keys:
            reason = f"the rows of {self.name!r} have a key {INDEX_KEY!r} of their own"
            raise InvalidRequestError(argument="with_index", reason=reason)
        order = epoch_order(sampler, batch_size[0], epoch=epoch)
        share = share_of(batch_size[0], rank=rank, world_size=world_size)
        if drop_last:
            share = share[: batch_size[0] // world_size // num_rows * num_rows]

        def read(rows: Any) -> Any:
            td = self._read_batch(rows, pad, timeout_s)
            return _add_index(td, rows) if with_index else td

        plan = EpochPlan(order, share, num_rows)
        return EpochBatches(self.name, read, plan, start=start, prefetch=prefetch, device=resolve_device(device))


class StoreRows(_DatasetRows, Epochs):
    """A tensordict store as a dataset."""

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

        def _read(self, *_: Any, **__: Any) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        """Yields the rows, as ``iter(td)`` does, read in blocks; each block is as of one moment.

        Raises:
            TypeError: The store has no batch dimension.
        """
        batch_size = self.spec.batch_size
        if not batch_size and self.spec.root.inner:  # one piece: only its content has the dimensions
            return iter(self[...])
        if not batch_size:
            raise TypeError(
                f"iteration over store {self.name!r}, which has no batch dimension; items() has its entries"
            )
        return row_by_row(self, batch_size[0], self.spec.nbytes)

    def _read_batch(self, rows: Any, pad: Pad, timeout_s: float | None) -> Any:
        selection = encode(rows, batch_size=self.spec.batch_size, store=self.name)
        return self._read(selection, pad=pad, timeout_s=timeout_s)


class TableRows(_DatasetRows):
    """A table as a dataset: its indices are row numbers, as returned by ``extend``."""

    def __iter__(self) -> Iterator[Any]:
        """Yields the live rows, read in blocks. Rows that are added or deleted meanwhile shift the others."""
        return _in_blocks(lambda start, stop: self[start:stop], self.spec.nbytes)


def _add_index(td: Any, rows: Any) -> Any:
    if not isinstance(td, TensorDictBase):
        raise InvalidRequestError(argument="with_index", reason=f"a {type(td).__name__} accepts no further keys")
    numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.from_numpy(rows)
    numbers = numbers.reshape(-1, *[1] * (td.ndim - 1)).expand(td.batch_size).clone()
    if not td.is_locked:
        return td.set(INDEX_KEY, numbers)
    return td.unlock_().set(INDEX_KEY, numbers).lock_()


def row_by_row(rows: Any, num_rows: int, nbytes: int) -> Iterator[Any]:
    """Yields rows of a store or view one by one, read in blocks.

    Args:
        rows: Reads a block by its slice.
        num_rows: How many there are.
        nbytes: Of all of them.
    """

    def read(start: int, stop: int) -> Any:
        return rows[start : min(stop, num_rows)] if start < num_rows else ()

    return _in_blocks(read, nbytes // max(num_rows, 1))


def _in_blocks(read: Callable[[int, int], Any], row_nbytes: int) -> Iterator[Any]:
    most = max(1, min(BLOCK_ROWS, BLOCK_NBYTES // max(row_nbytes, 1)))
    start, num_rows = 0, min(FIRST_BLOCK_ROWS, most)
    while len(block := read(start, start + num_rows)):
        yield from block
        start += len(block)
        num_rows = min(2 * num_rows, most)
