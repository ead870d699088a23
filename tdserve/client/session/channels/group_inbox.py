"""Events that the server sends about groups, passed in order to the epoch that each belongs to."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tdserve.base.errors import TDServeError
from tdserve.v1 import control_pb2

MAX_EARLY_EVENTS = 65_536
"""Most events of epochs that this client does not know yet: entries of the other members' rendezvous, one each."""

MAX_NAMES = 1024
"""Groups whose last finished epoch is remembered; some programs use one group for each client that joins and leaves."""

OnEvent = Callable[[control_pb2.GroupEvent], None]
OnLost = Callable[[TDServeError], None]
Leave = Callable[..., None]

_Key = tuple[str, int]


class GroupInbox:
    """The group events of one session.

    An event may arrive before the answer that names its epoch; it is kept until then.

    Threads: safe. Listeners are called in the session's own threads, and must not block.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: dict[_Key, tuple[OnEvent, OnLost, Leave]] = {}
        self._early: dict[_Key, list[control_pb2.GroupEvent]] = {}
        self._last: dict[str, int] = {}  # last epoch that was attached, by name
        self._over = 0  # numbers grow within a session: lower ones are of epochs that are over, of any other name
        self._lost: TDServeError | None = None

    def on_event(self, event: control_pb2.GroupEvent) -> None:
        """Receives an event; drops it if its epoch is over."""
        key = (event.name, event.epoch)
        with self._lock:
            listener = self._listeners.get(key)
            if listener is None:
                kept = self._early.setdefault(key, [])
                if event.epoch > self._last.get(event.name, self._over) and len(kept) < MAX_EARLY_EVENTS:
                    kept.append(event)
                if not kept:
                    del self._early[key]
                return
            listener[0](event)  # within the lock, to keep the order

    def attach(self, name: str, epoch: int, on_event: OnEvent, on_lost: OnLost, leave: Leave) -> None:
        """Passes events of an epoch to these callbacks; at once those that arrived before."""
        with self._lock:
            self._listeners[name, epoch] = (on_event, on_lost, leave)
            self._last[name] = max(epoch, self._last.pop(name, 0))
            if len(self._last) > MAX_NAMES:
                self._over = max(self._over, self._last.pop(next(iter(self._last))))
            for early in [key for key in self._early if key[0] == name and key[1] <= epoch]:
                for event in self._early.pop(early):
                    if early[1] == epoch:
                        on_event(event)
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def detach(self, name: str, epoch: int) -> None:
        """Ends an epoch for the caller. Idempotent."""
        with self._lock:
            self._listeners.pop((name, epoch), None)

    def lose(self, error: TDServeError) -> None:
        """Passes the end of the session to all epochs."""
        with self._lock:
            self._lost = error
            listeners = list(self._listeners.values())
        for _, on_lost, _ in listeners:
            on_lost(error)

    def leave_all(self, flush: Callable[[], None]) -> None:
        """Leaves all groups before the client is closed, so that the other members do not take its members for dead.

        Args:
            flush: Waits until the messages are sent; called if there are any.
        """
        with self._lock:
            listeners = list(self._listeners.values())
        for _, _, leave in listeners:
            leave(stays_connected=True)
        if listeners:
            flush()
        for _, _, leave in listeners:
            leave()
