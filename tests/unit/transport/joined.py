"""The rendezvous of two ends in one process."""

from __future__ import annotations

from tdserve.transport.rendezvous import KVStore


def joined_stores() -> tuple[KVStore, KVStore]:
    """Returns the two ends of one rendezvous."""
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    return stores[0], stores[1]
