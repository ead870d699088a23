"""Answers of committed requests, kept so that a retry after a lost answer changes nothing twice; on disk too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.transfer import RequestLog

MAX_ANSWERS_PER_CLIENT = 256
"""A client has at most 64 writes under way; older answers are never asked for again."""

_REQUEST_BYTES = 8


class Answers:
    """The log of committed requests, by client and request number.

    Args:
        db: Where it is kept; what it holds is read back at once.
    """

    def __init__(self, db: CatalogDB) -> None:
        self._db = db
        entries = (
            (key[:-_REQUEST_BYTES], int.from_bytes(key[-_REQUEST_BYTES:], "big"), answer)
            for key, answer in db.scan("requests")
        )
        self._log = RequestLog.restore(entries, MAX_ANSWERS_PER_CLIENT)
        self._stale: list[bytes] = []

    def seen(self, client_id: bytes, request: int) -> bytes | None:
        """The answer that this request already got; None for a new one."""
        return self._log.seen(client_id, request)

    @contextmanager
    def transaction(self, client_id: bytes, request: int, answer: bytes) -> Iterator[Transaction]:
        """A transaction that commits what a request changed, and its answer with it: both, or neither when it fails."""
        with self._db.transaction() as txn:
            txn.put("requests", _key(client_id, request), answer)
            for key in self._stale:
                txn.delete("requests", key)
            yield txn
        self._stale = [_key(client_id, dropped) for dropped in self._log.record(client_id, request, answer)]

    def forget_before(self, client_id: bytes, oldest: int) -> None:
        """Drops what the client says it will not ask for again."""
        dropped = self._log.forget_before(client_id, oldest)
        if dropped:
            with self._db.transaction() as txn:
                for request in dropped:
                    txn.delete("requests", _key(client_id, request))

    def forget_client(self, client_id: bytes) -> None:
        """Drops all of a client that is gone for good."""
        dropped = self._log.forget_client(client_id)
        if dropped:
            with self._db.transaction() as txn:
                for request in dropped:
                    txn.delete("requests", _key(client_id, request))

    def clients(self) -> set[bytes]:
        """Everybody of whom an answer is kept."""
        return {client_id for client_id, _, _ in self._log.entries()}


def _key(client_id: bytes, request: int) -> bytes:
    return client_id + request.to_bytes(_REQUEST_BYTES, "big")
