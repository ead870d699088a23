"""The memory of deleted stores: released once nothing uses it any more, and returned to the kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tdserve.base.machine import return_freed_memory

LET_GO_S = 0.05
"""Delay before the memory of a deleted store is released: by then, requests under way for it have been answered."""

RETURN_AFTER_S = 1.0
"""Time after the deletion of a store in which others that are deleted too release their memory, before what is free is
returned to the kernel."""


class DeletedMemory:
    """The memory of the deleted stores of one server."""

    def __init__(self) -> None:
        self._returning: asyncio.TimerHandle | None = None

    def release(self, *parts: object) -> None:
        """Releases the parts of a deleted store soon, unless others still hold them."""
        # Releasing the mappings and rules of very many rows takes long: a thread does it, once nothing else holds them.
        held = [*parts]
        loop = asyncio.get_running_loop()
        loop.call_later(LET_GO_S, partial(_run_apart, held.clear))
        if self._returning is None:
            self._returning = loop.call_later(RETURN_AFTER_S, self._return_memory)

    def _return_memory(self) -> None:
        self._returning = None
        _run_apart(return_freed_memory)


def _run_apart(work: Callable[[], None]) -> None:
    """Has a thread do what no request waits for; at the end of the server nothing."""
    with suppress(RuntimeError):  # the threads have been shut down
        asyncio.get_running_loop().run_in_executor(None, work)
