"""The mover of a client on the server's machine: this process reads and writes the server's files by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tdserve.client.content.leaves import leaves_of
from tdserve.client.local.claims import RowClaim
from tdserve.client.local.end import LocalEnd
from tdserve.client.session.mover import Mover
from tdserve.client.session.outgoing import Outgoing, Target
from tdserve.client.transfers.placing import PlacedContent
from tdserve.data.opened import MappedStore
from tdserve.messages.content import write_layout
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2


class LocalMover(Mover):
    """Copies what the server lets it copy.

    Args:
        local: The session's other end.
    """

    transport = "shm"
    max_joined_bytes = 32 * 1024 * 1024  # all that it costs is that they become visible together
    takes_claims = True
    is_ready = True
    inline_bytes = sys.maxsize

    def __init__(self, local: LocalEnd) -> None:
        self._local = local

    def prepare(
        self,
        captured: Sequence[Captured],
        target: Target,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """To be written in place."""
        return PlacedContent(captured if fetch is None else [fetch()], target, self._local)

    def take_apart(self, captured: Captured) -> None:
        """The thread that copies it finds its leaves."""
        leaves_of(captured, write_layout(captured.spec))

    def open_claim(self, name: str, stored: Spec, claim: control_pb2.Claim) -> RowClaim:
        """Opens the claim file."""
        return RowClaim(self._local, name, stored, claim)

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """One that the server has let this process read."""
        return self._local.known(name, spec)

    def open_mapped(self, name: str, spec: Spec, accepted: control_pb2.Accepted) -> MappedStore:
        """Errors as of ``LocalEnd.store``."""
        return self._local.store(name, accepted.uid, spec, structure=accepted.structure)

    def check_maps(self, what: str, *, writable: bool) -> None:
        """It may not be able to write."""
        if writable:
            self._local.check_writable(f"{what} writable")

    def forget_deleted(self) -> None:
        """Unmaps them."""
        self._local.forget_deleted()
