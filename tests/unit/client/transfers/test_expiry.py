"""Writes whose time is over."""

from __future__ import annotations

import time
from queue import SimpleQueue

from tdserve.client.transfers.expiry import ExpiryWatch

WAIT_S = 20.0


class Writes:
    """Writes that all end when they are late.

    Args:
        limit_s: Seconds from now until then.
        fails: Whether ending them raises.
    """

    def __init__(self, limit_s: float, *, fails: bool = False) -> None:
        self._end_s = time.monotonic() + limit_s
        self._fails = fails
        self._is_finished = False
        self.looks: SimpleQueue[bool] = SimpleQueue()

    def end_late(self, now_s: float) -> None:
        self._is_finished = now_s >= self._end_s
        self.looks.put(self._is_finished)
        if self._fails:
            raise ValueError("as told")

    def is_finished(self) -> bool:
        return self._is_finished


def test_watch_when_writes_are_late_then_they_are_ended_whatever_others_do() -> None:
    watch, writes = ExpiryWatch(), Writes(0.2)
    watch.watch(Writes(0.2, fails=True))
    watch.watch(writes)
    while not writes.looks.get(timeout=WAIT_S):
        pass
    assert writes.is_finished()


def test_watch_when_writes_have_ended_then_they_are_looked_at_no_more() -> None:
    watch, first, second = ExpiryWatch(), Writes(0.0), Writes(0.0)
    for _ in range(2):
        watch.watch(first)
        assert first.looks.get(timeout=WAIT_S)
        watch.watch(second)
        assert second.looks.get(timeout=WAIT_S)
        assert first.looks.empty()
        first.__init__(0.0)  # type: ignore[misc]
        second.__init__(0.0)  # type: ignore[misc]
