"""Answers of committed requests, kept so that a retry after a lost answer changes nothing twice; on disk too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.base.errors import ServerBusyError, WrongStateError
from tdserve.rules.request_log import RequestLog
from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.v1 import control_pb2

MAX_ANSWERS_PER_CLIENT = 1024
"""That a client has not said to have got. Ours leaves some 200 at most: it tells every 64 requests what has come."""

_REQUEST_BYTES = 8


class CommittedAnswers:
    """The log of committed requests, by client and request number.

    Args:
        db: Where it is kept; what it holds is read back at once.
    """

    def __init__(self, db: CatalogDB) -> None:
        self._db = db
        self._log = RequestLog.restore(
            (key[:-_REQUEST_BYTES], int.from_bytes(key[-_REQUEST_BYTES:], "big"), answer)
            for key, answer in db.scan("requests")
        )
        self._stale: list[bytes] = []  # forgotten, and erased with the next transaction

    def seen(self, client_id: bytes, request: int) -> bytes | None:
        """The answer that is kept for this request; None for one that has none."""
        return self._log.find_answer(client_id, request)

    def earlier(self, client_id: bytes, request: int) -> bytes | None:
        """The answer of an earlier attempt of this request; None where this is the one to carry out.

        Raises:
            WrongStateError: The client has said that it asks for this no more. An answer may have been forgotten since:
                whoever carried this attempt out might do so for the second time.
        """
        if self._log.is_over(client_id, request):
            raise WrongStateError(state="over", event=f"another attempt of request {request}")
        return self._log.find_answer(client_id, request)

    def check_room(self, client_id: bytes) -> None:
        """Raises ServerBusyError when a client lets its answers pile up. It may say with the same request what it has
        got, and is let through then."""
        if self._log.num_kept(client_id) >= MAX_ANSWERS_PER_CLIENT:
            what = "answers that this client has not said to have got"
            raise ServerBusyError(what=what, asked=1, free=0, limit=MAX_ANSWERS_PER_CLIENT)

    @contextmanager
    def transaction(
        self,
        client_id: bytes,
        request: int,
        answer: bytes,
        *,
        instead_of: int | None = None,
        is_decided: bool = False,
        frees_room: bool = False,
    ) -> Iterator[Transaction]:
        """A transaction that commits what a request changed, and its answer with it: both, or neither when it fails.

        Args:
            instead_of: A request of the same client that is known not to come again: its answer is forgotten.
            is_decided: As of ``CatalogDB.transaction``: what is done already must not fail for want of space.
            frees_room: As there.

        Raises:
            WrongStateError: The request was answered before. Nothing was changed.
        """
        self._log.check_new(client_id, request)
        stale = self._stale if instead_of is None else [*self._stale, _key(client_id, instead_of)]

        def remember() -> None:
            self._stale = []
            self._log.record(client_id, request, answer, instead_of=instead_of)

        with self._db.transaction(is_decided=is_decided, frees_room=frees_room) as txn:
            for key in stale:
                txn.delete("requests", key)
            txn.put("requests", _key(client_id, request), answer)
            txn.show(remember)
            yield txn

    def forget(self, client_id: bytes, answered: control_pb2.Answered) -> None:
        """Drops what the client says it will not ask for again."""
        forgotten = self._log.forget(client_id, answered.below, frozenset(answered.but_for))
        self._stale += [_key(client_id, request) for request in forgotten]

    def forget_client(self, client_id: bytes) -> None:
        """Drops all of a client that is gone for good."""
        dropped = self._log.forget_client(client_id)
        if dropped:
            with self._db.transaction(is_decided=True) as txn:
                for request in dropped:
                    txn.delete("requests", _key(client_id, request))

    def clients(self) -> set[bytes]:
        """Everybody of whom an answer is kept."""
        return {client_id for client_id, _, _ in self._log.entries()}


def _key(client_id: bytes, request: int) -> bytes:
    return client_id + request.to_bytes(_REQUEST_BYTES, "big")
