"""The unary calls under way, which end with the tokens of their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tdserve.base.errors import ConnectError, LocalProtocolError, TDServeError, UnauthenticatedError
from tdserve.control.audit import AuditLog
from tdserve.rules.access.grants import Caller, Grant


class UnaryCalls:
    """The calls that are being answered, each by a task of its own. One that waits for a store may take long.

    Args:
        audit: Notes those that end with their token.
    """

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._callers: dict[asyncio.Task[Any], Caller] = {}
        self._errors: dict[asyncio.Task[Any], TDServeError] = {}

    @contextmanager
    def hold(self, caller: Caller) -> Iterator[None]:
        """Runs a block, in a task, that is cut short when the caller's token is over.

        Raises:
            UnauthenticatedError: The token has expired, or was revoked.
            ConnectError: The token's entry was changed: the caller may call again.
        """
        task = asyncio.current_task()
        if task is None:
            raise LocalProtocolError(reason="hold() outside a task")
        self._callers[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._errors:  # its client is gone, or the server ends
                raise
        finally:
            del self._callers[task]
            error = self._errors.pop(task, None)
        if error is not None:  # even if an answer was there already, which the token does not grant any more
            raise error

    def end_outdated(self, explain_end: Callable[[Grant], str | None], server_address: str) -> None:
        """Ends the calls whose token is over; arguments as in ``Sessions.end_outdated``."""
        for task, caller in self._callers.items():
            reason = explain_end(caller.grant)
            if reason is None or task in self._errors:
                continue
            why = reason or "the entry of its token was changed"
            if reason:
                self._errors[task] = UnauthenticatedError(address=server_address, reason=reason)
            else:
                self._errors[task] = ConnectError(address=server_address, reason=why)
            self._audit.note_end(caller, why, what="a call")
            task.cancel()
