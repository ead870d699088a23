"""When leases end that do not last as long as their session.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

_MIN_STALE = 64
"""Entries of leases that have ended or were renewed are stale. The heap is rebuilt once they outnumber live ones by
this many (amortised constant time)."""


class LeaseEnds:
    """The ends of some leases, by number. A lease without one is unknown here, and costs nothing."""

    def __init__(self) -> None:
        self._end_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Returns the number of leases that have an end."""
        return len(self._end_s)

    @property
    def num_entries(self) -> int:
        """Entries in memory, with those that are stale."""
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """When the next lease ends; infinite if none does."""
        heap = self._heap
        while heap and self._end_s.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def set(self, number: int, end_s: float) -> None:
        """Has a lease end at this time, and not at the one that was set before."""
        self._end_s[number] = end_s
        heappush(self._heap, (end_s, number))
        if len(self._heap) > 2 * len(self._end_s) + _MIN_STALE:
            self._heap = [(each_s, each) for each, each_s in self._end_s.items()]
            heapify(self._heap)

    def drop(self, number: int) -> None:
        """Forgets the end of a lease, if it has one."""
        self._end_s.pop(number, None)

    def take_over(self, now_s: float) -> int | None:
        """Returns a lease that ends at this time or before, which it forgets; None if there is none."""
        if self.next_s > now_s:
            return None
        _, number = heappop(self._heap)
        del self._end_s[number]
        return number
