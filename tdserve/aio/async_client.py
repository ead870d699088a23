"""The client whose calls are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, ParamSpec

from tdserve.aio.async_calls import Calls, OpeningCall
from tdserve.aio.async_handles import (
    AsyncGroup,
    AsyncKeyedHandle,
    AsyncQueueHandle,
    AsyncReplayHandle,
    AsyncStoreHandle,
    AsyncSubscription,
)
from tdserve.aio.async_objects import AsyncSequence, make_coroutine, make_handle_coroutine, make_opening
from tdserve.base.integers import check_integer
from tdserve.client import client as sync, connecting
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.session_client import SessionClient

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_THREADS = 64
"""Calls of one client that are under way at once; a thread is started when it is first needed."""

_Parameters = ParamSpec("_Parameters")


class AsyncClient(AsyncSequence, of=sync.Client, hides=SessionClient, attributes=("address", "timeout_s", "is_closed")):
    """A client whose calls are coroutines: of :class:`tdserve.Client`, with the same names and arguments.

    The calls of several tasks continue at the same time, up to ``max_threads`` of them; further ones wait. None has a
    place in an order: await one before the next where the order counts. Threads: one event loop uses it.
    One that is dropped without ``close`` ends as a :class:`tdserve.Client` does.

    Args:
        client: Does the work; it is closed with this one.
        max_threads: Threads for calls.
    """

    def __init__(self, client: sync.Client, *, max_threads: int = MAX_THREADS) -> None:
        super().__init__(client, Calls(check_integer("max_threads", max_threads, 1)))

    async def close(self) -> None:
        """Closes the client; calls that wait end with ClosedError. Idempotent."""
        try:
            if not self.sync.is_closed:
                await self._calls.run(self.sync.close, is_end=True)
        finally:
            self._calls.shut_down()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    stores = make_coroutine(sync.Client.stores)
    keys = make_coroutine(sync.Client.keys)
    describe = make_coroutine(sync.Client.describe)
    delete = make_coroutine(sync.Client.delete)
    checkpoint = make_coroutine(sync.Client.checkpoint)
    restore = make_coroutine(sync.Client.restore)
    stats = make_coroutine(sync.Client.stats)
    init_remote = make_coroutine(sync.Client.init_remote)
    from_remote_init = make_coroutine(sync.Client.from_remote_init)
    send = make_coroutine(sync.Client.send)
    recv = make_coroutine(sync.Client.recv)
    memmap = make_handle_coroutine(sync.Client.memmap, AsyncStoreHandle)
    memmap_like = make_handle_coroutine(sync.Client.memmap_like, AsyncStoreHandle)
    load_memmap = make_coroutine(sync.Client.load_memmap)
    create_replay = make_handle_coroutine(sync.Client.create_replay, AsyncReplayHandle)
    replay = make_handle_coroutine(sync.Client.replay, AsyncReplayHandle)
    create_queue = make_handle_coroutine(sync.Client.create_queue, AsyncQueueHandle)
    queue = make_handle_coroutine(sync.Client.queue, AsyncQueueHandle)
    create_kv = make_handle_coroutine(sync.Client.create_kv, AsyncKeyedHandle)
    kv = make_handle_coroutine(sync.Client.kv, AsyncKeyedHandle)
    publish = make_coroutine(sync.Client.publish)
    latest = make_coroutine(sync.Client.latest)
    wait_newer = make_coroutine(sync.Client.wait_newer)
    version = make_coroutine(sync.Client.version)
    versions = make_coroutine(sync.Client.versions)
    subscribe = make_opening(sync.Client.subscribe, AsyncSubscription)
    group = make_opening(sync.Client.group, AsyncGroup)


def _connect_as(
    call: Callable[_Parameters, sync.Client],
) -> Callable[_Parameters, OpeningCall[AsyncClient]]:
    def connect(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> OpeningCall[AsyncClient]:
        """Connects to a server; arguments and errors as in :func:`tdserve.connect`.

        ``client = await tdserve.aio.connect(address)`` or ``async with tdserve.aio.connect(address) as client``.
        """

        async def open_client() -> AsyncClient:
            future = AwaitableFuture[sync.Client]()
            Thread(target=future.run, args=(partial(call, *args, **kwargs),), name="tdserve-aio-connect").start()
            try:
                return AsyncClient(await future)
            except asyncio.CancelledError:
                future.add_done_callback(_close_found)
                raise

        return OpeningCall(open_client())

    return connect


def _close_found(future: Future[sync.Client]) -> None:
    if future.exception() is None:
        future.result().close()


connect = _connect_as(connecting.connect)
