"""The claim of a writer that takes the next rows of a ring by itself, as its table and its session use it."""

from __future__ import annotations

from typing import Protocol


class Claims(Protocol):
    """Rows that one writer may claim. Nothing else changes their generations before the claim is taken back."""

    @property
    def num(self) -> int:
        """Number that distinguishes it from other claims of this writer."""

    @property
    def is_settled(self) -> bool:
        """Whether it is taken back, and all claimed rows are settled."""

    def catch_up(self) -> None:
        """Brings the table up to date with the writer: claimed rows leave all samples, filled rows become live."""

    def check_committed(self) -> None:
        """Raises CapacityError if filled rows could not be made live at the last attempt."""

    def take_back(self) -> None:
        """Like :meth:`catch_up`, and ends the claim: only rows that are being filled still belong to the writer."""

    def abandon(self) -> None:
        """Like :meth:`take_back`, when the writer is known to be gone: unfilled rows become free."""
