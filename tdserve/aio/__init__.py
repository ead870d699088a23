"""tdserve for asyncio: ``tdserve.aio.connect`` gives the client and its handles with coroutines in place of calls.

Every object here wraps a synchronous one, and passes each call on to a thread of its client, so that the event loop
continues.

Read ``async_client`` first; its handles are ``async_handles``. Their classes are made by ``async_objects``, from the
synchronous ones; ``async_calls`` has the threads. ``dtensor`` has the calls of ``tdserve.dtensor``.
"""

from __future__ import annotations

from tdserve.aio.async_client import AsyncClient, connect
from tdserve.aio.async_handles import (
    AsyncBatches,
    AsyncEpochBatches,
    AsyncGroup,
    AsyncKeyedHandle,
    AsyncQueueHandle,
    AsyncReplayHandle,
    AsyncReplayWriter,
    AsyncStoreHandle,
    AsyncStoreView,
    AsyncSubscription,
    AsyncTaken,
    AsyncTakenBatches,
)

__all__ = [
    "AsyncBatches",
    "AsyncClient",
    "AsyncEpochBatches",
    "AsyncGroup",
    "AsyncKeyedHandle",
    "AsyncQueueHandle",
    "AsyncReplayHandle",
    "AsyncReplayWriter",
    "AsyncStoreHandle",
    "AsyncStoreView",
    "AsyncSubscription",
    "AsyncTaken",
    "AsyncTakenBatches",
    "connect",
]
