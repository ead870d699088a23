"""Records of local writers in the catalog, by store, by the writer's lock and by a number."""

from __future__ import annotations

from collections.abc import Iterator

from tdserve.store.database.catalog_db import CatalogDB


def make_key(kind: str, *, uid: str, lock_name: str, num: int) -> bytes:
    """Returns the key of one record.

    Args:
        kind: Kind of the record; one word.
        uid: Incarnation of the store.
        lock_name: Name of the lock that the writer's process holds.
        num: Number that distinguishes this writer's records of one kind.
    """
    return _make_prefix(kind, uid) + f"{lock_name}:{num}".encode()


def list_keys(db: CatalogDB, kind: str, uid: str) -> list[bytes]:
    """Returns the keys of all records of one kind and store."""
    return [key for key, _ in db.scan("pending", _make_prefix(kind, uid))]


def load(db: CatalogDB, kind: str, uid: str) -> Iterator[tuple[str, int, bytes]]:
    """Yields lock name, number and content of each record of one kind and store."""
    prefix = _make_prefix(kind, uid)
    for key, content in db.scan("pending", prefix):
        lock_name, num = key[len(prefix) :].decode().split(":")
        yield lock_name, int(num), content


def _make_prefix(kind: str, uid: str) -> bytes:
    return f"{kind}:{uid}:".encode()
