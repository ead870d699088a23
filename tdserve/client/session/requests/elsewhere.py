"""Calls about stores that are at another server than the one whose client has been asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreMovedError
from tdserve.client.session.requests.request_numbers import RequestNumbers

_Client = TypeVar("_Client")

FindMoved = Callable[[StoreMovedError, Deadline], _Client]
"""Finds the client of the server to which a store has moved, within the deadline of a call. Raises StoreMovedError."""

Follow = Callable[[_Client, str, Callable[[_Client], Any], Deadline], Any]
"""Makes a call of a client about a store, where that is: it may have moved before its server ended."""


def find_no_server(error: StoreMovedError, deadline: Deadline) -> NoReturn:
    """Raises the error: the client knows one server."""
    raise error


def follow_nowhere(client: _Client, store: str, call: Callable[[_Client], Any], deadline: Deadline) -> Any:
    """Makes the call at the one server that the client knows."""
    return call(client)


def renumber(
    request: int | None, begun_at: RequestNumbers, made_at: RequestNumbers, deadline: Deadline, *, is_write: bool
) -> int | None:
    """Returns the number under which a request is made at a client.

    Args:
        request: Its number where it was begun; None: each attempt takes a new one.
        begun_at: The numbers of that client.
        made_at: The numbers of the client at whose server it is made: it keeps its number there if it has not ended.
        deadline: Deadline of the call.
        is_write: Whether it is a write.
    """
    if request is None or (begun_at is made_at and begun_at.is_under_way(request)):
        return request
    begun_at.end(request)
    return made_at.begin(deadline, is_write=is_write)
