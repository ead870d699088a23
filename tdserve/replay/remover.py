"""Which rows make room when a table is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Fifo:
    """First in, first out: the oldest rows are overwritten. The ring itself is this rule."""

    kind: ClassVar[str] = "fifo"


Remover = Fifo
"""Every remover there is: one is a frozen dataclass with ``kind``."""
