"""Rendezvous of the ranks of a group: a key-value store whose entries travel over the authenticated session."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Condition

import torch.distributed as dist

from tdserve.base.errors import ConnectError

CONNECT_TIMEOUT_S = 20.0
"""Timeout of connecting. Both ends are alive when they start to connect, so this only bounds a network that drops
packets."""


class KVStore(dist.Store):  # type: ignore[name-defined,misc]
    """The rendezvous of one group. What one end sets is passed to ``publish``, and the other ends ``feed`` it.

    It replaces ``TCPStore``, which always listens on all interfaces; here the addresses travel over the authenticated
    session. Threads: ``feed`` may be called from any thread.

    Attributes:
        timeout_s: Seconds for which ``get`` waits for an entry.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._entries: dict[str, bytes] = {}
        self._changed = Condition()
        self._is_closed = False
        self.timeout_s = CONNECT_TIMEOUT_S

    @property
    def is_closed(self) -> bool:
        """Whether the session that carries the entries is over."""
        return self._is_closed

    def feed(self, key: str, value: bytes) -> None:
        """Takes an entry that the other end has set."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes all waits for an entry, which then raise ConnectError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Sends this rank's address; gloo calls it."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.feed(key, content)
        self._publish(key, content)

    def get(self, key: str) -> bytes:
        """Waits for another rank's address, and returns it; gloo calls it."""
        return self.get_within(key, self.timeout_s)

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """Waits for an entry and returns it.

        Raises:
            ConnectError: It did not come in time, is empty, or the session ended.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._entries or self._is_closed, timeout_s):
                raise ConnectError(address=key, reason=f"the peer's gloo address did not come within {timeout_s} s")
            if key not in self._entries:
                raise ConnectError(address=key, reason="the session was closed during the rendezvous")
            if not self._entries[key]:  # gloo would read beyond it, and crash the process
                raise ConnectError(address=key, reason="the peer's gloo address is empty")
            return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for entries; gloo calls it before ``get``."""
        for key in keys:
            self.get(key)


class Branch(KVStore):
    """A part of another key-value store: several groups find each other through one rendezvous."""

    def __init__(self, trunk: KVStore, name: str) -> None:
        super().__init__(lambda key, value: None)
        self._trunk = trunk
        self._name = name

    @property
    def is_closed(self) -> bool:
        """See KVStore."""
        return self._is_closed or self._trunk.is_closed

    def set(self, key: str, value: bytes | str) -> None:
        """See KVStore."""
        self._trunk.set(f"{self._name}/{key}", value)

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """See KVStore."""
        return self._trunk.get_within(f"{self._name}/{key}", timeout_s)
