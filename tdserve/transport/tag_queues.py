"""First in, first out, for each tag: a tag without entries takes no memory, as each request has another."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

_Entry = TypeVar("_Entry")


class TagQueues(Generic[_Entry]):
    """Queues by tag, or by whatever distinguishes messages. Threads: one at a time."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[_Entry]] = {}

    def __len__(self) -> int:
        """Returns the number of tags with entries."""
        return len(self._queues)

    def put(self, tag: Hashable, entry: _Entry) -> None:
        """Adds an entry behind those of its tag."""
        self._queues.setdefault(tag, deque()).append(entry)

    def take(self, tag: Hashable) -> _Entry | None:
        """Removes the first entry of a tag and returns it; None if there is none."""
        queue = self._queues.get(tag)
        if queue is None:
            return None
        entry = queue.popleft()
        if not queue:
            del self._queues[tag]
        return entry

    def find_last(self, tag: Hashable) -> _Entry | None:
        """Returns the last entry of a tag; None if there is none."""
        queue = self._queues.get(tag)
        return None if queue is None else queue[-1]

    def clear(self) -> None:
        """Removes all entries."""
        self._queues.clear()
