"""Unary calls that change something; each is carried out once, however often its client sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

from tdserve.base.ids import check_client_id
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.sessions.clients import Clients
from tdserve.server.waiting import retrieve_exception
from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.v1 import control_pb2


class Record(Protocol):
    """A function that opens the transaction that commits a change together with its answer."""

    def __call__(self, answer: bytes, *, frees_room: bool = False) -> AbstractContextManager[Transaction]: ...


_Answer = TypeVar("_Answer", control_pb2.CreateStoreResponse, control_pb2.DeleteStoreResponse)


class UnaryChanges:
    """The changes that unary calls make; a retry gets the answer of the earlier attempt.

    Args:
        db: Catalog in which changes are committed.
        answers: Answers of numbered requests.
        clients: Notified of each call: the answers of a client without a session are kept for a time too.
    """

    def __init__(self, db: CatalogDB, answers: CommittedAnswers, clients: Clients) -> None:
        self._db = db
        self._answers = answers
        self._clients = clients
        self._under_way: dict[tuple[bytes, int], asyncio.Future[Any]] = {}

    async def run(
        self, name: control_pb2.RequestId, change: Callable[[Record], Awaitable[_Answer]], answer: _Answer
    ) -> _Answer:
        """Makes a change, unless this request has made it before or is making it now.

        The change goes on if its caller goes away in the middle: half-created files would remain.

        Args:
            name: Id of the request; without a number, a retry is not recognised.
            change: Makes the change in the transaction that it opens; if it raises, nothing was changed.
            answer: An empty answer.

        Raises:
            InvalidRequestError: The client's id is invalid.
            WrongStateError: The client has reported that it will not repeat this request.
            ServerBusyError: Too many answers of this client are kept, whose arrival it has not reported.
        """
        if not name.request:
            unnumbered = asyncio.ensure_future(change(self._begin_unnumbered))
            unnumbered.add_done_callback(retrieve_exception)
            return await asyncio.shield(unnumbered)
        key = check_client_id(name.client_id), name.request
        self._clients.on_call(name.client_id)
        self._answers.forget(name.client_id, name.answered)
        task = self._under_way.get(key)
        if task is None:
            answered = self._answers.find_earlier(*key)
            if answered is not None:
                answer.ParseFromString(answered)
                return answer
            self._answers.check_room(name.client_id)
            task = asyncio.ensure_future(change(partial(self._answers.begin_transaction, *key)))
            self._under_way[key] = task
            task.add_done_callback(partial(self._on_finished, key))
        made: _Answer = await asyncio.shield(task)
        return made

    def _begin_unnumbered(self, answer: bytes, *, frees_room: bool = False) -> AbstractContextManager[Transaction]:
        return self._db.begin_transaction(frees_room=frees_room)

    def _on_finished(self, key: tuple[bytes, int], task: asyncio.Future[Any]) -> None:
        del self._under_way[key]
        retrieve_exception(task)
