"""One line in the log for each refused call, without secrets; what is repeated is counted."""

from __future__ import annotations

import logging
import re

from tdserve.base.errors import PermissionDeniedError, TDServeError
from tdserve.base.logs import SparseLog
from tdserve.rules.access.grants import Caller, Grant

MAX_KINDS = 1_000
"""Kinds of refusals that are counted on their own: by entry of a token, call and error."""

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""Where a word begins in the name of a method: other lines name calls in snake case."""

_log = logging.getLogger("tdserve.audit")


class AuditLog:
    """Logs refusals: one line in ten seconds for each entry of a token, call and error, with the number of others.

    Threads: one.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], SparseLog] = {}

    def note_stranger(self, peer: str, error: TDServeError, *, named: Grant | None, method: str) -> None:
        """Notes a call whose token is missing, wrong or over.

        Args:
            named: What the entry grants, or granted, that it names; None if there is none.
            method: Path of the call.
        """
        why = str(error.fields.get("reason") or "its token is missing or wrong")
        token, role = ("", "none") if named is None else (named.name, named.role.label)
        call = _CAPITAL.sub("_", method.rpartition("/")[2]).lower()
        # Any process may cause these: the method, which is any text, makes no kind.
        facts = f"token {token!r}, role {role}, call {call!r}"
        self._note((token, why, error.code), f"refused a call from {peer}: {why} ({facts})")

    def note_refusal(self, caller: Caller, error: TDServeError, *, call: str, store: str = "") -> None:
        """Notes a call that the token does not grant, or that is beyond its limits."""
        grant = caller.grant
        if isinstance(error, PermissionDeniedError):
            needed = error.fields["needed"]
            why = f"it needs role {needed} {error.scope}".rstrip() if needed else "the token does not include the store"
            call, store = error.call, error.store
        else:
            why = str(error)
        facts = f"token {grant.name!r}, role {grant.role.label}, call {call!r}, store {store!r}"
        self._note((grant.name, call, error.code), f"refused a call from {caller.peer}: {why} ({facts})")

    def note_end(self, caller: Caller, reason: str, *, what: str = "a session") -> None:
        """Notes that a session or call was ended because of its token."""
        facts = f"token {caller.grant.name!r}, role {caller.grant.role.label}"
        self._note((caller.grant.name, "end", reason), f"ended {what} of {caller.peer}: {reason} ({facts})")

    def _note(self, kind: tuple[str, str, str], message: str) -> None:
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds.setdefault(kind, SparseLog(_log)).warn(message)
