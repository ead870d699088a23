"""What a buffer changes in rows that it has: TorchRL's own methods change ``storage[:]``, which is a copy here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class TableEdits:
    """``set_at_``, ``set_`` and ``update_`` of a buffer, with TorchRL's arguments. Each key is one write.

    Args:
        buffer: What they return.
        storage: Its storage.
    """

    def __init__(self, buffer: Any, storage: Any) -> None:
        self._buffer = buffer
        self._storage = storage

    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        """Writes a key of some rows.

        Args:
            index: Row numbers, also negative ones, or a slice, as in ``storage[index]``; or a mask with one element per
                row of ``storage[:]``.

        Raises:
            SelectionError: A row is not live. Nothing was written.
        """
        if not isinstance(index, slice):
            index = torch.as_tensor(index).reshape(-1)
        self._storage.overwrite(key, value, self._find_numbers(index))
        return self._buffer

    def set_(self, key: Any, value: Any) -> Any:
        """Writes a key of all rows."""
        self._storage.overwrite(key, value, self._storage.list_numbers())
        return self._buffer

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Iterable[Any] | None = None
    ) -> Any:
        """Writes some keys of all rows; those that are given are copied in any case."""
        for key in input_dict_or_td.keys() if keys_to_update is None else keys_to_update:
            self.set_(key, input_dict_or_td[key])
        return self._buffer

    def _find_numbers(self, index: slice | torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        if isinstance(index, slice):
            found = self._storage.list_numbers(index)
        elif index.dtype == torch.bool:
            found = self._storage.list_numbers()[index]
        elif (index < 0).any():
            live = self._storage.list_numbers()
            found = torch.where(index < 0, index + (int(live[-1]) + 1 if len(live) else 0), index)
        else:
            found = index
        return found
