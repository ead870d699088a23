"""What control keeps of an open keyed store. Its entries are elsewhere: control never reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tdserve.rules.kv.keyed_settings import KeyedSettings


@dataclass(eq=False)
class KeyWatch:
    """A wait for keys.

    Attributes:
        is_notified: Whether one of them was put since this was last False.
    """

    is_notified: bool = False


class KeyWatches:
    """Waits for keys of one store: a put concerns only those that wait for one of its keys."""

    def __init__(self) -> None:
        self._watches: dict[bytes, set[KeyWatch]] = {}

    def __len__(self) -> int:
        return len(self._watches)

    @contextmanager
    def watch(self, keys: Collection[bytes]) -> Iterator[KeyWatch]:
        """A block that watches keys."""
        watch = KeyWatch()
        for key in keys:
            self._watches.setdefault(key, set()).add(watch)
        try:
            yield watch
        finally:
            for key in set(keys):
                watches = self._watches[key]
                watches.discard(watch)
                if not watches:
                    del self._watches[key]

    def notify(self, keys: Collection[bytes]) -> bool:
        """Notifies those that watch one of the keys; returns whether there is any."""
        watches = [watch for key in keys for watch in self._watches.get(key, ())] if self._watches else []
        for watch in watches:
            watch.is_notified = True
        return bool(watches)


@dataclass
class KeyedState:
    """The state of one store.

    Attributes:
        settings: Its settings.
        watches: Requests that wait for keys.
        recorded: Requests (client and number) whose answers are on record, which the process that has written them is
            told with the next change.
    """

    settings: KeyedSettings
    watches: KeyWatches = field(default_factory=KeyWatches)
    recorded: dict[bytes, None] = field(default_factory=dict)
