"""What the sessions and calls of one token use at the moment, held to its limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from google.protobuf.message import Message

from tdserve.base.errors import ServerBusyError
from tdserve.rules.access.grants import NO_LIMITS, Grant, Limits
from tdserve.server.execution.admission_budget import REQUEST_BYTES

MAX_IDLE_USAGES = 1_000
"""Tokens without anything under way whose rate is remembered."""


class TokenUsage:
    """The requests of one token that are under way, and how fast they came.

    Args:
        name: Name of the token's entry.
        now_s: A clock that never goes back.
    """

    def __init__(self, name: str, now_s: Callable[[], float]) -> None:
        self._name = name
        self._now_s = now_s
        self.num_requests = self.held_nbytes = 0
        self._allowance = 0.0
        self._counted_s: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.num_requests

    def admit(self, limits: Limits, nbytes: int) -> AbstractContextManager[None]:
        """Returns the context of a request of this many bytes, which counts during it.

        Raises:
            ServerBusyError: It is beyond a limit; nothing was counted.
        """
        nbytes += REQUEST_BYTES
        if limits.requests is not None:
            self._check("requests under way", 1, self.num_requests, limits.requests)
        if limits.held_bytes is not None:
            self._check("bytes of requests", nbytes, self.held_nbytes, limits.held_bytes)
        if limits.rate is not None:
            self._take_turn(limits.rate)
        return _CountedRequest(self, nbytes)

    def _check(self, what: str, asked: int, used: int, limit: int) -> None:
        if asked > limit - used:
            what = f"{what} of token {self._name!r}"
            raise ServerBusyError(what=what, asked=asked, free=max(limit - used, 0), limit=limit)

    def _take_turn(self, rate: float) -> None:
        """Takes one of the turns that come at this rate; up to one second of them are saved for a burst."""
        now_s, most = self._now_s(), max(rate, 1.0)
        gained = most if self._counted_s is None else (now_s - self._counted_s) * rate
        self._allowance, self._counted_s = min(self._allowance + gained, most), now_s
        if self._allowance < 1.0:
            what = f"requests per second of token {self._name!r}"
            raise ServerBusyError(what=what, asked=1, free=0, limit=round(rate, 3))
        self._allowance -= 1.0

    def count(self, num_requests: int, nbytes: int) -> None:
        """Adds what is under way from now on; negative numbers remove it."""
        self.num_requests += num_requests
        self.held_nbytes += nbytes


class _CountedRequest(AbstractContextManager[None]):
    """A block during which a request counts."""

    __slots__ = ("_nbytes", "_usage")

    def __init__(self, usage: TokenUsage, nbytes: int) -> None:
        self._usage = usage
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._usage.count(1, self._nbytes)

    def __exit__(self, *_: object) -> None:
        self._usage.count(-1, -self._nbytes)


UNCOUNTED: AbstractContextManager[None] = nullcontext()
"""The context of a request that no limit counts."""


class TokenUsages:
    """The usages of all tokens that have limits.

    Args:
        now_s: A clock that never goes back.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._usages: dict[str, TokenUsage] = {}

    def admit(self, grant: Grant, message: Message) -> AbstractContextManager[None]:
        """Returns the context of a request. Raises ServerBusyError if it is beyond a limit of its token."""
        if grant.limits == NO_LIMITS:
            return UNCOUNTED
        usage = self._usages.get(grant.name)
        if usage is None:
            if len(self._usages) >= MAX_IDLE_USAGES:
                self._usages = {name: each for name, each in self._usages.items() if not each.is_idle}
            usage = self._usages[grant.name] = TokenUsage(grant.name, self._now_s)
        return usage.admit(grant.limits, message.ByteSize())
