"""Rows that a local client has claimed: its extends fill them without asking the server.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial

from tdserve.base.errors import TDServeError
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_writes import fill_rows
from tdserve.data.places import Places
from tdserve.data.row_claim import RowClaim
from tdserve.messages.row_numbers import Rows
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class LocalClaim:
    """A local client's claim. Threads: safe, one extend at a time.

    Args:
        local: The session's local end.
        name: Name of the table.
        stored: Its whole structure.
        claim: The server's grant.
        client_id: Id of the client.

    Raises:
        TDServeError: This process cannot use it: the store is gone or may not be written, or the session is over.
    """

    def __init__(self, local: LocalEnd, name: str, stored: Spec, claim: control_pb2.Claim, *, client_id: bytes) -> None:
        self._local = local
        self._client_id = client_id
        self._store = local.store(name, claim.uid, stored, structure=claim.structure)
        self._rows = RowClaim(self._store, local.root / claim.path, claim, notify=self._notify)
        local.keep(self)

    @property
    def num_extends(self) -> int:
        """Extends that have used it."""
        return self._rows.num_extends

    @property
    def is_exhausted(self) -> bool:
        """Whether it ended because the server had not yet committed what was claimed before."""
        return self._rows.is_exhausted

    def extend(self, request: int, captured: Sequence[Captured]) -> Rows | None:
        """Writes rows, and returns their numbers. None if the server must be asked, and then the claim is over.

        Args:
            request: Number of this request, which a retry uses too.
            captured: Their content, in order.

        Raises:
            ConnectError: The session is lost. A retry finds out whether the rows are stored.
        """
        num_rows = sum(each.spec.batch_size[0] for each in captured)
        return self._rows.extend(ClaimedRows(self._client_id, request, num_rows), partial(self._fill, captured))

    def close(self) -> None:
        """Waits until no row is being filled, and lets none be filled any more."""
        self._rows.close()

    def _fill(self, captured: Sequence[Captured], _: Rows, places: Places) -> None:
        fill_rows(self._store, places, captured)

    def _notify(self, claimed: control_pb2.Claimed) -> None:
        """Messages the server. Of an abandoned claim it also learns by the end of the session."""
        with suppress(TDServeError) if claimed.abandons else nullcontext():
            self._local.send(control_pb2.ClientMessage(claimed=claimed))
