"""``dumps`` and ``loads`` of a storage: its rows as a memory-mapped tensordict in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

_METADATA = "storage_metadata.json"
_TENSOR = "tensor"


class TableCheckpointer(StorageCheckpointerBase):
    """Writes the rows of a table into a folder, the oldest first, and reads them back; hooks work as TorchRL's do."""

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Writes the rows into a folder, which need not exist."""
        path = Path(path)
        path.mkdir(exist_ok=True)
        rows = storage.read_by_age()
        is_tensor = isinstance(rows, torch.Tensor)
        num_rows = 0 if rows is None else len(rows)
        if is_tensor:
            rows = TensorDict({_TENSOR: rows}, [num_rows])
        for hook in self._save_hooks:
            rows = hook(rows, path=path)
        if rows is not None:
            rows.memmap(path, copy_existing=True)
        metadata = {"metadata": {}, "is_pytree": False, "len": num_rows, "is_tensor": is_tensor}
        (path / _METADATA).write_text(json.dumps(metadata))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Replaces the rows by those of a folder, which this or TorchRL's checkpointer of tensordicts has written."""
        path = Path(path)
        metadata = json.loads((path / _METADATA).read_text())
        num_rows = metadata["len"]
        rows = TensorDict.load_memmap(path) if num_rows else None
        for hook in self._load_hooks:
            rows = hook(rows, out=None)
        if rows is not None:
            rows = rows[:num_rows]
            rows = rows[_TENSOR] if metadata.get("is_tensor") else rows
        storage.replace_rows(rows)
