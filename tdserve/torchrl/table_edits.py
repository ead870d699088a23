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

        Raises:
            SelectionError: A row is not live. Nothing was written.
        """
        numbers = torch.arange(len(self._storage))
        if not isinstance(index, (slice, int)):
            index = torch.as_tensor(index)
        self._storage.overwrite(key, value, numbers[index].reshape(-1))
        return self._buffer

    def set_(self, key: Any, value: Any) -> Any:
        """Writes a key of all rows."""
        self._storage.overwrite(key, value, torch.arange(len(self._storage)))
        return self._buffer

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Iterable[Any] | None = None
    ) -> Any:
        """Writes some keys of all rows; those that are given are copied in any case."""
        for key in input_dict_or_td.keys() if keys_to_update is None else keys_to_update:
            self.set_(key, input_dict_or_td[key])
        return self._buffer
