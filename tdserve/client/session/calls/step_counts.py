"""The steps of data-parallel readers: each reader of a table has one count, however many handles a client has of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class StepCount:
    """Counts the steps that one reader has had. Threads: safe."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = Lock()

    @property
    def next(self) -> int:
        """Returns the step of the next call that names none."""
        return self._next

    @contextmanager
    def take(self, step: int | None = None) -> Iterator[int]:
        """A block with the step that a call names, or else the next one. The count continues behind it, unless the
        block raises."""
        with self._lock:
            before = self._next
            taken = before if step is None else step
            self._next = taken + 1
        try:
            yield taken
        except BaseException:
            with self._lock:
                if self._next == taken + 1:
                    self._next = before
            raise

    def take_prefetched(self, step: int, *, is_named: bool) -> bool:
        """Takes a step that was read ahead; returns False if it was not named, and the reader has had it by now."""
        with self._lock:
            if step < self._next and not is_named:
                return False
            self._next = step + 1
            return True


class StepCounts:
    """The counts of all readers of a client, from 0. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[tuple[str, int, int, str], StepCount] = {}

    def get(self, uid: str, rank: int, world_size: int, run: str = "") -> StepCount:
        """Returns the count of a rank, of a number of them, in a run on the table of this incarnation."""
        with self._lock:
            return self._counts.setdefault((uid, rank, world_size, run), StepCount())

    def restart(self, uid: str) -> None:
        """Makes all counts on a table begin at 0 again."""
        with self._lock:
            self._counts = {reader: count for reader, count in self._counts.items() if reader[0] != uid}
