"""Channels of a whole epoch in one process, each rank in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tdserve.base.deadline import Deadline
from tdserve.transport.group_content import CALL_TAG, CallChannel
from tdserve.transport.group_gloo import GroupChannel
from tdserve.transport.pool import BufferPool
from tdserve.transport.rendezvous import KVStore
from tests.gloo_secret import CREDENTIAL

TIMEOUT_S = 20.0

_Result = TypeVar("_Result")


class Channels:
    """The channels by rank, and threads to use them."""

    def __init__(self, size: int, names: Sequence[str] = ()) -> None:
        self._threads = ThreadPoolExecutor(size)
        stores: list[KVStore] = []

        def publish(rank: int) -> Callable[[str, bytes], None]:
            def tell(key: str, value: bytes) -> None:
                for store in stores:
                    if store is not stores[rank]:
                        store.feed(key, value)

            return tell

        stores += [KVStore(publish(rank)) for rank in range(size)]

        def make(rank: int) -> GroupChannel:
            return GroupChannel(
                stores[rank],
                rank,
                size,
                host="127.0.0.1",
                credential=CREDENTIAL,
                name="g",
                timeout_s=TIMEOUT_S,
                peers=names,
            )

        self.channels = [
            future.result(TIMEOUT_S) for future in [self._threads.submit(make, rank) for rank in range(size)]
        ]

    def each(self, call: Callable[[CallChannel], _Result], *, timeout_s: float = TIMEOUT_S) -> list[_Result]:
        """Returns the results of a call at each rank, made by all at once."""
        channels = [
            CallChannel(channel, CALL_TAG, Deadline.after(timeout_s), BufferPool()) for channel in self.channels
        ]
        return [future.result(TIMEOUT_S) for future in [self._threads.submit(call, channel) for channel in channels]]

    def close(self) -> None:
        """Closes the channels and ends the threads."""
        for channel in self.channels:
            channel.close()
        self._threads.shutdown()


@contextmanager
def open_channels(size: int, names: Sequence[str] = ()) -> Iterator[Channels]:
    """Makes channels of so many ranks; ``names`` as in ``GroupChannel.peers``."""
    channels = Channels(size, names)
    try:
        yield channels
    finally:
        channels.close()
