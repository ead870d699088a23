"""Stores at rest for as long as a test needs. Checkpoints and moves bring stores to rest for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import pytest

import tdserve
from tdserve.client.moves.move_steps import request_step

_Result = TypeVar("_Result")

WAIT_S = 1.0
"""How long to watch a call that waits for the end of a rest. If the call ends earlier, the test fails."""


class Rest:
    """Brings a store of a server to rest; a context manager, which ends it.

    Args:
        server: It.
        name: Name of the store.
    """

    def __init__(self, server: tdserve.Server, name: str) -> None:
        self._client, self._name = server.client(), name
        self._uid = request_step(self._client, name, list_files=True).uid
        self._move = f"{5:032x}"

    def begin(self) -> None:
        """Has the server refuse all requests for the store."""
        request_step(self._client, self._name, uid=self._uid, move=self._move, seal=True)

    def end(self) -> None:
        """Has the store serve again."""
        request_step(self._client, self._name, uid=self._uid, move=self._move, unseal=True)

    def __enter__(self) -> Rest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()  # with its session the seal ends


@contextmanager
def at_rest(server: tdserve.Server, name: str) -> Iterator[None]:
    """Has a store of a server at rest during the block."""
    with Rest(server, name) as rest:
        rest.begin()
        yield


def wait_through_rest(server: tdserve.Server, name: str, call: Callable[[], _Result]) -> _Result:
    """Makes a call while a store is at rest, ends the rest once the call has waited, and returns the call's result."""
    with ThreadPoolExecutor(1) as threads:
        with at_rest(server, name):
            found = threads.submit(call)
            with pytest.raises(FutureTimeoutError):
                found.result(WAIT_S)
        return found.result(30.0)
