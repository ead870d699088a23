"""Handles, iterators and writers whose methods are coroutines.

A method is written down only for type checkers, or because its result is entered or iterated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from tdserve.aio.async_objects import (
    _END,
    BLOCK,
    AsyncIterating,
    AsyncObject,
    AsyncSequence,
    AsyncSteps,
    AsyncTensorDictCalls,
    make_coroutine,
    make_opening,
)
from tdserve.client.cluster.stores.sharded_keyed import ShardedKeyedHandle
from tdserve.client.cluster.tables.sharded_batches import ShardedBatches, ShardedTaken
from tdserve.client.cluster.tables.sharded_queue import ShardedQueueHandle
from tdserve.client.cluster.tables.sharded_replay import ShardedReplayHandle
from tdserve.client.datasets.epoch_batches import EpochBatches
from tdserve.client.groups.group import Group
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.view import StoreView
from tdserve.client.kv.entry_mapping import EntryIterator
from tdserve.client.kv.keyed_handle import KeyedHandle
from tdserve.client.tables.draws.batches import Batches
from tdserve.client.tables.draws.taken_batches import TakenBatches
from tdserve.client.tables.draws.taking import Taken
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tables.writers.writer import ReplayWriter
from tdserve.client.weights.subscription import Subscription


class AsyncTaken(AsyncObject, of=Taken):
    """Rows on lease: acknowledged at a clean end of the block, given back if it raises or is cancelled."""

    has_end = True


class AsyncTakenBatches(AsyncSteps, of=TakenBatches):
    """An iterator over batches on lease."""


class AsyncBatches(AsyncSteps, of=Batches):
    """An iterator over samples that are requested ahead."""


class AsyncEpochBatches(AsyncSteps, of=EpochBatches):
    """An iterator over the batches of an epoch."""


class AsyncSubscription(AsyncSteps, of=Subscription):
    """An iterator over versions of weights."""


class AsyncReplayWriter(AsyncObject, of=ReplayWriter, attributes=("name",)):
    """A writer of single rows."""

    has_end = True
    append = make_coroutine(ReplayWriter.append)
    flush = make_coroutine(ReplayWriter.flush)
    close = make_coroutine(ReplayWriter.close)


class AsyncGroup(AsyncObject, of=Group):
    """A member of a group. A call that is cancelled continues: the other members wait for its part."""

    has_end = True
    gives_up = False


class AsyncStoreView(AsyncTensorDictCalls, of=StoreView, attributes=("name",)):
    """A view of a tensordict store."""

    batches = make_opening(StoreView.batches, AsyncEpochBatches)


class AsyncStoreHandle(AsyncTensorDictCalls, of=StoreHandle, asks=("is_locked", "saved_path")):
    """A tensordict store.

    Attributes:
        batch_size: Batch size of the store that was last read, with -1 where rows differ; ``refresh`` asks the server.
        shape: The same as ``batch_size``.
    """

    batch_size = property(lambda self: torch.Size(self.sync.spec.root.shown_batch_size))
    shape = batch_size
    batches = make_opening(StoreHandle.batches, AsyncEpochBatches)
    get = make_coroutine(StoreHandle.get)
    get_at = make_coroutine(StoreHandle.get_at)
    to_tensordict = make_coroutine(StoreHandle.to_tensordict)
    lock_ = make_opening(StoreHandle.lock_, AsyncTensorDictCalls)
    unlock_ = make_opening(StoreHandle.unlock_, AsyncTensorDictCalls)


_TABLE = ("name", "capacity", "spec", "settings")


class AsyncReplayHandle(AsyncSequence, of=ReplayHandle, attributes=_TABLE):
    """A replay store."""

    extend = make_coroutine(ReplayHandle.extend)
    sample = make_coroutine(ReplayHandle.sample)
    update_priority = make_coroutine(ReplayHandle.update_priority)
    set_at_ = make_coroutine(ReplayHandle.set_at_)
    update_if_present = make_coroutine(ReplayHandle.update_if_present)
    info = make_coroutine(ReplayHandle.info)
    take = make_opening(ReplayHandle.take, AsyncTaken)
    batches = make_opening(ReplayHandle.batches, AsyncBatches)
    writer = make_opening(ReplayHandle.writer, AsyncReplayWriter)  # type: ignore[arg-type]  # its **options might be self=


class AsyncQueueHandle(AsyncSequence, of=QueueHandle, attributes=_TABLE):
    """A queue."""

    extend = make_coroutine(QueueHandle.extend)
    ack = make_coroutine(QueueHandle.ack)
    close = make_coroutine(QueueHandle.close)
    info = make_coroutine(QueueHandle.info)
    take = make_opening(QueueHandle.take, AsyncTaken)
    batches = make_opening(QueueHandle.batches, AsyncTakenBatches)
    writer = make_opening(QueueHandle.writer, AsyncReplayWriter)  # type: ignore[arg-type]  # its **options might be self=


class AsyncEntries(AsyncIterating, of=EntryIterator):
    """An iterator over entries, or values of entries, that are read in batches."""

    _block: Iterator[Any] = iter(())

    async def __anext__(self) -> Any:
        found = next(self._block, _END)
        if found is _END:
            self._block = iter(await self._take_step(lambda: list(islice(self.sync, BLOCK))))
            found = next(self._block, _END)
        if found is _END:
            raise StopAsyncIteration
        return found

    async def __aenter__(self) -> AsyncEntries:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


class AsyncKeyedHandle(AsyncSequence, of=KeyedHandle, attributes=("name", "settings", "spec")):
    """A keyed store."""

    put = make_coroutine(KeyedHandle.put)
    get = make_coroutine(KeyedHandle.get)
    pop = make_coroutine(KeyedHandle.pop)
    delete = make_coroutine(KeyedHandle.delete)
    keys = make_coroutine(KeyedHandle.keys)
    items = make_opening(KeyedHandle.items, AsyncEntries)
    values = make_opening(KeyedHandle.values, AsyncEntries)
    update = make_coroutine(KeyedHandle.update)
    setdefault = make_coroutine(KeyedHandle.setdefault)
    clear = make_coroutine(KeyedHandle.clear)
    versions = make_coroutine(KeyedHandle.versions)
    info = make_coroutine(KeyedHandle.info)


class AsyncShardedTaken(AsyncTaken, of=ShardedTaken):
    """Rows on lease from several servers."""


class AsyncShardedBatches(AsyncBatches, of=ShardedBatches):
    """An iterator over samples from several servers."""


class AsyncShardedReplayHandle(AsyncReplayHandle, of=ShardedReplayHandle, attributes=(*_TABLE, "part_capacity")):
    """A replay store that several servers share."""


class AsyncShardedQueueHandle(AsyncQueueHandle, of=ShardedQueueHandle, attributes=(*_TABLE, "part_capacity")):
    """A queue that several servers share."""


class AsyncShardedKeyedHandle(AsyncKeyedHandle, of=ShardedKeyedHandle, attributes=("name", "settings", "spec")):
    """A keyed store that several servers share."""
