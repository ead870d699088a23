"""Answers of committed requests, kept also on disk so that a retry after a lost answer changes nothing twice.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tdserve.base.errors import ServerBusyError, WrongStateError
from tdserve.base.ids import REQUEST_BYTES
from tdserve.rules.request_log import RequestLog
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.v1 import control_pb2

MAX_ANSWERS_PER_CLIENT = 1024
"""Most answers whose arrival a client has not reported. Ours leaves about 200 at most: it reports every 64 requests."""


class Answer(NamedTuple):
    """The serialised answer to a request of a client."""

    client_id: bytes
    request: int
    content: bytes


class CommittedAnswers:
    """The log of committed requests, by client and request number.

    Args:
        db: Catalog that keeps the log; the log on disk is read at once.
    """

    def __init__(self, db: CatalogDB) -> None:
        self._db = db
        self._log = RequestLog.restore(
            (key[:-REQUEST_BYTES], int.from_bytes(key[-REQUEST_BYTES:], "big"), answer)
            for key, answer in db.scan("requests")
        )
        self._stale: list[bytes] = []  # forgotten, but not yet erased: the next transaction does so

    def find_answer(self, client_id: bytes, request: int) -> bytes | None:
        """Returns the answer that is kept for this request; None if there is none."""
        return self._log.find_answer(client_id, request)

    def find_earlier(self, client_id: bytes, request: int) -> control_pb2.Done | None:
        """Returns the answer of an earlier attempt of this request; None if this attempt is to be carried out.

        Raises:
            WrongStateError: The client has reported that it will not repeat this request. Its answer may have been
                dropped since, so carrying out this attempt might apply the request twice.
        """
        if self._log.is_over(client_id, request):
            raise WrongStateError(state=f"request {request} is over", event="another attempt")
        answer = self._log.find_answer(client_id, request)
        return None if answer is None else control_pb2.Done.FromString(answer)

    def check_room(self, client_id: bytes) -> None:
        """Raises ServerBusyError if too many answers of a client are kept. Call ``forget`` before with what the same
        request reports as arrived."""
        if self._log.count_kept(client_id) >= MAX_ANSWERS_PER_CLIENT:
            what = "answers whose arrival this client has not reported"
            raise ServerBusyError(what=what, asked=1, free=0, limit=MAX_ANSWERS_PER_CLIENT)

    def is_expected(self, client_id: bytes, request: int) -> bool:
        """Returns whether this request has no answer yet, and its client has not reported that it needs none."""
        return not self._log.is_over(client_id, request) and self._log.find_answer(client_id, request) is None

    @contextmanager
    def begin_transaction(
        self,
        client_id: bytes,
        request: int,
        answer: bytes,
        *,
        others: Sequence[Answer] = (),
        instead_of: int | None = None,
        is_decided: bool = False,
        uses_reserve: bool = False,
    ) -> Iterator[Transaction]:
        """A transaction that commits what a request changed together with its answer: both, or neither if it fails.

        Args:
            others: Answers to further requests that the change completes.
            instead_of: A request of the same client that is known not to be repeated; its answer is dropped.
            is_decided: As for ``CatalogDB.begin_transaction``: what is done already must not fail for lack of space.
            uses_reserve: As for ``CatalogDB.begin_transaction``.

        Raises:
            WrongStateError: One of the requests was answered before. Nothing was changed.
        """
        answers = (*others, Answer(client_id, request, answer))
        for each in answers:
            self._log.check_new(each.client_id, each.request)
        stale = self._stale if instead_of is None else [*self._stale, _make_key(client_id, instead_of)]

        def remember() -> None:
            self._stale = []
            for each in others:
                self._log.record(*each)
            self._log.record(client_id, request, answer, instead_of=instead_of)

        with self._db.begin_transaction(is_decided=is_decided, uses_reserve=uses_reserve) as txn:
            for key in stale:
                txn.delete("requests", key)
            for each in answers:
                txn.put("requests", _make_key(each.client_id, each.request), each.content)
            txn.show(remember)
            yield txn

    def forget(self, client_id: bytes, answered: control_pb2.Answered) -> None:
        """Drops the answers of requests that the client reports it will not repeat."""
        forgotten = self._log.forget(client_id, answered.below, frozenset(answered.but_for))
        self._stale += [_make_key(client_id, request) for request in forgotten]

    def forget_client(self, client_id: bytes) -> None:
        """Drops all answers of a client that is gone for good."""
        dropped = self._log.forget_client(client_id)
        if dropped:
            with self._db.begin_transaction(is_decided=True) as txn:
                for request in dropped:
                    txn.delete("requests", _make_key(client_id, request))

    def list_clients(self) -> set[bytes]:
        """Returns the ids of the clients of which an answer is kept."""
        return {client_id for client_id, _, _ in self._log.iter_entries()}


def _make_key(client_id: bytes, request: int) -> bytes:
    return client_id + request.to_bytes(REQUEST_BYTES, "big")
