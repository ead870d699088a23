"""The claim of a writer that takes rows of a ring by itself, as its table and its session use it.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from typing import Protocol

from tdserve.messages.row_numbers import Rows


class WriterClaim(Protocol):
    """Rows that one writer may claim. Nothing else changes their generations before the claim is taken back.

    A sole writer claims the next rows of the ring. Of several writers each has a block of rows that are promised to it,
    and which others do not get.
    """

    @property
    def num(self) -> int:
        """Number that distinguishes it from other claims of this writer."""

    def may_hold(self, client_id: bytes) -> bool:
        """Returns whether an extend of this client may be among the rows."""

    @property
    def writer_id(self) -> bytes:
        """Id of the writer, also across its sessions."""

    @property
    def promised(self) -> Rows:
        """Rows of a block that are not known to be claimed."""

    @property
    def num_left(self) -> int:
        """Rows that the writer may still claim, as far as is known here."""

    @property
    def is_block(self) -> bool:
        """Whether its rows are promised, and it may continue while others write."""

    @property
    def has_failed(self) -> bool:
        """Whether filled rows could not be made live at the last attempt."""

    @property
    def is_settled(self) -> bool:
        """Whether it is taken back, and all claimed rows are settled."""

    def catch_up(self) -> bool:
        """Brings the table up to date with the writer: claimed rows leave all samples, filled rows become live.

        Returns:
            Whether all filled rows are live.
        """

    def listen(self) -> None:
        """Makes the writer report every extend, because a call waits for the table."""

    def check_committed(self, client_id: bytes, request: int) -> None:
        """Raises CapacityError if rows that were filled could not be committed at the last attempt; if those of this
        very extend are among them, TransferAbortedError: it may be retried."""

    def take_back(self) -> None:
        """Like :meth:`catch_up`, and ends the claim: only rows that are being filled still belong to the writer."""

    def abandon(self) -> None:
        """Like :meth:`take_back`, when the writer is known to be gone: unfilled rows become free."""
