"""A storage of which only some keys are read."""

from __future__ import annotations

from typing import Any

from tdserve.structure.tree import Path
from tdserve.torchrl.table_rows import from_table


class NarrowStorage:
    """Stands for a storage where rows are read for the sake of some keys: no others are sent. All else is as of the
    storage itself. Threads: safe.

    Args:
        storage: A ``TDServeStorage`` that has a table.
        keys: Those to read, as the table has them.
    """

    def __init__(self, storage: Any, keys: tuple[Path, ...]) -> None:
        self._whole = storage
        self._keys = keys

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def get(self, index: Any) -> Any:
        """Reads the keys of rows by number, or of a slice of the live rows."""
        return from_table(self._whole.require_table().read_rows(index, self._keys))
