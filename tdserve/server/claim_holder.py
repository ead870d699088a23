"""A process that takes rows of tables by itself: a local client, or a data worker for the clients of its sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tdserve.rules.replay.claims import Claims
from tdserve.rules.replay.table import Table

FIRST_OFFER_EXTENDS = 4
"""Extends of one table by a worker's clients before the worker is offered a claim."""

MAX_PAUSE = 4096
"""Most extends between two offers, where others end claims before they are worth it."""

MIN_EXTENDS = 8
"""A claim was worth it if so many extends used it."""


@dataclass
class ClaimPacing:
    """Decides when a data worker is offered another claim on a table."""

    _pause: int = FIRST_OFFER_EXTENDS
    _num_left: int = FIRST_OFFER_EXTENDS

    def count_extend(self) -> bool:
        """Counts an extend without a claim, and returns whether it is time to offer one."""
        self._num_left -= 1
        return self._num_left <= 0

    def on_ended(self, num_extends: int) -> None:
        """Takes note of a claim that has ended after so many extends."""
        if num_extends >= MIN_EXTENDS:
            self._pause, self._num_left = FIRST_OFFER_EXTENDS, 1
        else:
            self._pause = self._num_left = min(2 * self._pause, MAX_PAUSE)


@dataclass
class ClaimHolder:
    """Whoever claims rows of tables.

    Attributes:
        lock_name: Names it among all, also of earlier runs of the server. A local client holds the lock of this name
            for as long as it may write; a worker needs none, since each run of the server begins without the workers of
            the last one.
        client_id: Id of the local client. b"" for a worker, which writes for many clients.
        on_broken: Called if its claim file contradicts itself.
        claims: Its claims, by the store's incarnation.
    """

    lock_name: str
    client_id: bytes
    on_broken: Callable[[], None]
    claims: dict[str, Claims] = field(default_factory=dict)
    _pacings: WeakKeyDictionary[Table, ClaimPacing] = field(default_factory=WeakKeyDictionary)

    @property
    def writer_id(self) -> bytes:
        """Id of the writer, also across its sessions."""
        return self.client_id or self.lock_name.encode()

    @property
    def is_local(self) -> bool:
        """Whether it is a local client."""
        return bool(self.client_id)

    def pace(self, table: Table) -> ClaimPacing:
        """Returns the pacing of its claims on a table."""
        return self._pacings.setdefault(table, ClaimPacing())
