"""A process that takes rows of tables by itself: a local client, or a data worker for the clients of its sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tdserve.rules.replay.claim_pacing import ClaimPacing
from tdserve.rules.replay.claims import Claims
from tdserve.rules.replay.table import Table


@dataclass
class ClaimHolder:
    """The data worker or local client that claims rows of tables.

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
