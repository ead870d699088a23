"""The claim of a writer that takes the next rows of a ring by itself, as its table and its session see it."""

from __future__ import annotations

from typing import Protocol


class Claims(Protocol):
    """Rows that one writer may claim. Nobody else changes their generations before the claim is taken back."""

    @property
    def num(self) -> int:
        """Tells it from other claims of this writer."""

    @property
    def is_settled(self) -> bool:
        """Whether it is taken back, and nothing that was claimed is open."""

    def catch_up(self) -> None:
        """Brings the table up to what the writer has done: rows that it has claimed are out of every sample, rows that
        it has filled are live."""

    def check_committed(self) -> None:
        """Raises CapacityError when rows that the writer has filled could not be made live at the last look."""

    def take_back(self) -> None:
        """As :meth:`catch_up`, and nothing more may be claimed: only rows that are being filled are still the
        writer's."""

    def abandon(self) -> None:
        """As :meth:`take_back`, and the writer is known to fill nothing more: what is open is anybody's."""
