"""What a token grants: a role, stores and limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any, NamedTuple

from tdserve.base.errors import PermissionDeniedError
from tdserve.rules.access.roles import Role, find_need
from tdserve.rules.placement import DIRECTORY, find_whole

ALL_STORES = ("*",)


class Limits(NamedTuple):
    """Limits of all sessions and calls of one token together; None: there is none.

    Attributes:
        sessions: Open sessions.
        requests: Requests and calls under way.
        held_bytes: Memory of those in the control process, bytes.
        rate: Requests and calls per second; up to as many may come at once.
    """

    sessions: int | None = None
    requests: int | None = None
    held_bytes: int | None = None
    rate: float | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Grant:
    """What one token grants. Two are equal if nothing about the token has changed.

    Attributes:
        name: Name of the token's entry, for logs and limits.
        role: What its holder may do.
        stores: Patterns of names, as in ``fnmatch``, of the stores that exist for its holder.
        limits: Its limits.
        expires_s: When it ends, seconds since the epoch.
        key: Digest of the token; no secret by itself, and not shown.
    """

    name: str
    role: Role = Role.ADMIN
    stores: tuple[str, ...] = ALL_STORES
    limits: Limits = NO_LIMITS
    expires_s: float = math.inf
    key: bytes = field(default=b"", repr=False)

    @cached_property
    def has_all_stores(self) -> bool:
        """Whether no store is hidden from its holder."""
        return "*" in self.stores

    @cached_property
    def is_full(self) -> bool:
        """Whether nothing is refused to its holder, and nothing counted."""
        return self.is_server_wide and self.limits == NO_LIMITS

    @property
    def is_counted(self) -> bool:
        """Whether control must see every request, to count it."""
        return self.limits.rate is not None or self.limits.requests is not None

    @property
    def is_server_wide(self) -> bool:
        """Whether its holder may see the figures of the whole server."""
        return self.role >= Role.ADMIN and self.has_all_stores

    @cached_property
    def _any_pattern(self) -> re.Pattern[str]:
        """One expression for all patterns: one after the other they would cost several microseconds per request."""
        return re.compile("|".join(map(translate, self.stores)) or r"(?!)")

    def has_store(self, name: str) -> bool:
        """Returns whether a store of this name would exist for its holder; of a part, whether the whole store would."""
        return self.has_all_stores or self._any_pattern.match(find_whole(name) or name) is not None

    def check(self, kind: str, asked: Any) -> None:
        """Checks a request; arguments as in ``find_need``.

        Raises:
            PermissionDeniedError: The token does not grant it. Names that it does not include are refused whether or
                not there is such a store, so that the answer reveals nothing about it. The number of servers
                (``DIRECTORY``) may be read by all.
        """
        if self.is_full:
            return
        need = find_need(kind, asked)
        for store in need.stores if not need.is_server_wide else ():
            if not self.has_store(store) and (store != DIRECTORY or need.role > Role.READ):
                raise PermissionDeniedError(role=self.role.label, call=need.call, store=store)
        if need.is_server_wide and not self.has_all_stores:
            needed = need.role.label
            raise PermissionDeniedError(role=self.role.label, call=need.call, needed=needed, scope="of all stores")
        if self.role < need.role:
            shown = need.stores[0] if need.stores else ""
            raise PermissionDeniedError(role=self.role.label, call=need.call, store=shown, needed=need.role.label)


class Caller(NamedTuple):
    """The origin of a call or session.

    Attributes:
        grant: What its token grants.
        peer: Its address, as gRPC shows it.
    """

    grant: Grant
    peer: str = ""


FULL_GRANT = Grant("")
"""That of every caller of a server that asks for no token."""

FULL_CALLER = Caller(FULL_GRANT)
