"""A process that takes rows of tables by itself: a local client, or a data worker for the clients of its sessions.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tdserve.rules.replay.allocation.claim_pacing import ClaimPacing
from tdserve.rules.replay.allocation.claims import WriterClaim
from tdserve.rules.replay.table import Table
from tdserve.server.processes.claim_writers import ClaimWriter, LocalWriter


@dataclass
class ClaimHolder:
    """The data worker or local client that claims rows of tables.

    Attributes:
        writer: Names it, and decides what differs between a local client and a worker.
        on_broken: Called if its claim file contradicts itself.
        claims: Its claims, by the store's incarnation.
        preparing: Incarnations of stores of which it is about to get a claim.
    """

    writer: ClaimWriter
    on_broken: Callable[[], None]
    claims: dict[str, WriterClaim] = field(default_factory=dict)
    preparing: set[str] = field(default_factory=set)
    _pacings: WeakKeyDictionary[Table, ClaimPacing] = field(default_factory=WeakKeyDictionary)

    @property
    def is_local(self) -> bool:
        """Whether it is a local client."""
        return isinstance(self.writer, LocalWriter)

    def pace(self, table: Table) -> ClaimPacing:
        """Returns the pacing of its claims on a table."""
        return self._pacings.setdefault(table, ClaimPacing())
