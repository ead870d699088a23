"""What is on record of a local writer in the catalog: kept by store, by the writer's lock and by a number."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.store.catalog_db import CatalogDB


def key_of(kind: str, *, uid: str, lock_name: str, num: int) -> bytes:
    """The key of one record.

    Args:
        kind: What is on record; one word.
        uid: The store's incarnation.
        lock_name: Held by the writer's process.
        num: Tells this writer's records of one kind apart.
    """
    return _prefix(kind, uid) + f"{lock_name}:{num}".encode()


def keys_of(db: CatalogDB, kind: str, uid: str) -> list[bytes]:
    """The keys of all records of one kind and store."""
    return [key for key, _ in db.scan("pending", _prefix(kind, uid))]


def load(db: CatalogDB, kind: str, uid: str) -> Iterator[tuple[str, int, bytes]]:
    """Lock name, number and content of each record of one kind and store."""
    prefix = _prefix(kind, uid)
    for key, content in db.scan("pending", prefix):
        lock_name, num = key[len(prefix) :].decode().split(":")
        yield lock_name, int(num), content


def _prefix(kind: str, uid: str) -> bytes:
    return f"{kind}:{uid}:".encode()
