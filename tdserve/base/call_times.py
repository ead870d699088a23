"""How often calls were made, how they ended and how long they took: counts by fixed bounds, cheap enough for every
call."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

BOUNDS_S = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the buckets, in seconds; one more bucket has the calls that took longer."""

NUM_BUCKETS = len(BOUNDS_S) + 1

MAX_CALLS = 64
"""Most names of calls that are told apart; there are about thirty."""

OTHER_CALL = "other"
"""Name of all calls beyond ``MAX_CALLS``."""


class CallTimes:
    """The calls that one observer has seen, by name.

    Threads: one, or those that hold a lock of its owner's.
    """

    def __init__(self) -> None:
        self._by_call: dict[str, CallTally] = {}

    def __iter__(self) -> Iterator[CallTally]:
        return iter(list(self._by_call.values()))

    def __bool__(self) -> bool:
        return bool(self._by_call)

    def count(self, call: str, seconds: float, code: str = "") -> None:
        """Counts a call.

        Args:
            call: Its name, one of few.
            seconds: Its duration.
            code: The code of its error, as in ``TDServeError.code``; "" if it succeeded.
        """
        tally = self._by_call.get(call) or self._make_tally(call)
        tally.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        tally.sum_s += seconds
        if code:
            tally.errors[code] += 1

    def add(self, call: str, buckets: list[int], sum_s: float, errors: dict[str, int]) -> None:
        """Adds what another observer has counted of a call, by the same bounds."""
        tally = self._by_call.get(call) or self._make_tally(call)
        tally.buckets = [mine + theirs for mine, theirs in zip(tally.buckets, buckets, strict=True)]
        tally.sum_s += sum_s
        tally.errors.update(errors)

    def _make_tally(self, call: str) -> CallTally:
        name = call if len(self._by_call) < MAX_CALLS - 1 else OTHER_CALL
        return self._by_call.setdefault(name, CallTally(name))


class CallTally:
    """The calls of one name.

    Attributes:
        call: The name.
        buckets: Number of calls by duration, one more than ``BOUNDS_S``.
        sum_s: Duration of all of them together.
        errors: Number of those that failed, by code.
    """

    __slots__ = ("buckets", "call", "errors", "sum_s")

    def __init__(self, call: str) -> None:
        self.call = call
        self.buckets = [0] * NUM_BUCKETS
        self.sum_s = 0.0
        self.errors: Counter[str] = Counter()
