"""Runs the proxies of these tests, each on an event loop of its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Protocol, TypeVar


class Proxy(Protocol):
    """Passes on what comes to its port."""

    async def listen(self) -> asyncio.Server:
        """Begins to listen."""


_Proxy = TypeVar("_Proxy", bound=Proxy)


@contextmanager
def run_proxy(proxy: _Proxy) -> Iterator[_Proxy]:
    """Runs a proxy for a block; ends all its connections then."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="proxy")
    thread.start()
    server = asyncio.run_coroutine_threadsafe(proxy.listen(), loop).result(10.0)
    try:
        yield proxy
    finally:

        async def end() -> None:
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
