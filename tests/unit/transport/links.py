"""Links of a whole epoch in one process, each rank in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tdserve.base.deadline import Deadline
from tdserve.transport.group_content import CALL_TAG, GroupWire
from tdserve.transport.group_gloo import GroupLink
from tdserve.transport.pool import BufferPool
from tdserve.transport.rendezvous import KVStore
from tests.bonds import BOND

TIMEOUT_S = 20.0

_Result = TypeVar("_Result")


class Links:
    """The links by rank, and threads to use them."""

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

        def make(rank: int) -> GroupLink:
            return GroupLink(
                stores[rank], rank, size, host="127.0.0.1", bond=BOND, name="g", timeout_s=TIMEOUT_S, peers=names
            )

        self.links = [future.result(TIMEOUT_S) for future in [self._threads.submit(make, rank) for rank in range(size)]]

    def each(self, call: Callable[[GroupWire], _Result], *, timeout_s: float = TIMEOUT_S) -> list[_Result]:
        """Returns the results of a call at each rank, made by all at once."""
        wires = [GroupWire(link, CALL_TAG, Deadline.after(timeout_s), BufferPool()) for link in self.links]
        return [future.result(TIMEOUT_S) for future in [self._threads.submit(call, wire) for wire in wires]]

    def close(self) -> None:
        """Closes the links and ends the threads."""
        for link in self.links:
            link.close()
        self._threads.shutdown()


@contextmanager
def linked(size: int, names: Sequence[str] = ()) -> Iterator[Links]:
    """Makes links of so many ranks; ``names`` as of ``GroupLink.peers``."""
    links = Links(size, names)
    try:
        yield links
    finally:
        links.close()
