"""The gate of all calls and requests: whether the caller's token grants them, and whether its limits have room."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from tdserve.base.errors import PermissionDeniedError, ServerBusyError
from tdserve.control.audit import AuditLog
from tdserve.rules.access.grants import Caller, Grant
from tdserve.server.access.token_usage import UNCOUNTED, TokenUsages
from tdserve.v1 import worker_pb2


def add_grant(opening: worker_pb2.OpenSession, grant: Grant) -> None:
    """Adds what a data worker must check before it answers a request of the session by itself."""
    if not grant.is_full:
        opening.grant.role, opening.grant.is_counted = grant.role, grant.is_counted
        opening.grant.stores.extend(grant.stores)


class Gate:
    """Checks what callers ask for, and notes what is refused.

    Attributes:
        audit: Notes refusals.
    """

    def __init__(self) -> None:
        self.audit = AuditLog()
        self._usages = TokenUsages()

    def authorize(self, caller: Caller, kind: str, asked: Any) -> AbstractContextManager[None]:
        """Returns the context of a request or call, during which it counts for its token.

        Args:
            kind: Its kind, and
            asked: its message, as in ``find_need``.

        Raises:
            PermissionDeniedError: The token does not grant it.
            ServerBusyError: A limit of the token has no room for it now.
        """
        if caller.grant.is_full:
            return UNCOUNTED
        try:
            caller.grant.check(kind, asked)
            return self._usages.admit(caller.grant, asked)
        except (PermissionDeniedError, ServerBusyError) as error:
            self.audit.note_refusal(caller, error, call=kind, store=str(getattr(asked, "store", "")))
            raise

    def is_notice_allowed(self, caller: Caller, kind: str, asked: Any) -> bool:
        """Returns whether the token grants a message that has no answer; notes it otherwise."""
        try:
            caller.grant.check(kind, asked)
        except PermissionDeniedError as error:
            self.audit.note_refusal(caller, error, call=kind)
            return False
        return True

    def check_session(self, caller: Caller, others: Iterable[Caller]) -> None:
        """Checks whether a token may have one more session beside others.

        Raises:
            ServerBusyError: Its limit of sessions is reached.
        """
        limit = caller.grant.limits.sessions
        if limit is None:
            return
        num_open = sum(other.grant.name == caller.grant.name for other in others)
        if num_open >= limit:
            what = f"another session of token {caller.grant.name!r}"
            error = ServerBusyError(what=what, asked=1, free=0, limit=limit)
            self.audit.note_refusal(caller, error, call="session")
            raise error
