"""``dumps`` and ``loads`` of a storage: its rows as a memory-mapped tensordict in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from tdserve.base.errors import InvalidRequestError

_METADATA = "storage_metadata.json"
_PRIORITIES = "priorities.npy"
_TENSOR = "tensor"
_TORCHRL_TENSOR = "_-single-tensor-_"
"""Name of a tensor that TorchRL has written: its rows have no keys."""


class TableCheckpointer(StorageCheckpointerBase):
    """Writes the rows of a table into a folder, the oldest first, and their priorities if the table has some, and reads
    both back; hooks work as TorchRL's do."""

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Writes the rows into a folder, which need not exist."""
        path = Path(path)
        path.mkdir(exist_ok=True)
        rows, priority = storage.read_by_age()
        is_tensor = isinstance(rows, torch.Tensor)
        num_rows = 0 if rows is None else len(rows)
        if is_tensor:
            rows = TensorDict({_TENSOR: rows}, [num_rows])
        is_full = num_rows == storage.max_size
        for hook in self._save_hooks:
            given = {"is_full": is_full, "shift": 0 if is_full else num_rows}  # where the oldest row of a full one is
            for name in given.keys() & set(dir(hook)):
                setattr(hook, name, given[name])
            rows = hook(rows, path=path)
        if rows is not None:
            rows.memmap(path, copy_existing=True)
        if priority is None:
            (path / _PRIORITIES).unlink(missing_ok=True)
        else:
            np.save(path / _PRIORITIES, priority.numpy())
        metadata = {"metadata": {}, "is_pytree": False, "len": num_rows, "is_tensor": is_tensor}
        (path / _METADATA).write_text(json.dumps(metadata))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Replaces the rows by those of a folder, which this or TorchRL's checkpointer has written.

        Raises:
            InvalidRequestError: They are neither tensordicts nor tensors.
        """
        path = Path(path)
        metadata = json.loads((path / _METADATA).read_text())
        num_rows = metadata["len"]
        if metadata["is_pytree"]:
            storage.replace_rows(_read_tensor(path, metadata["metadata"])[:num_rows])
            return
        rows = TensorDict.load_memmap(path) if num_rows else None
        for hook in self._load_hooks:
            rows = hook(rows, out=None)
        if rows is not None:
            rows = rows[:num_rows]
            rows = rows[_TENSOR] if metadata.get("is_tensor") else rows
        file = path / _PRIORITIES
        storage.replace_rows(rows, torch.from_numpy(np.load(file)) if file.exists() else None)


def _read_tensor(path: Path, leaves: dict[str, Any]) -> torch.Tensor:
    if leaves.keys() != {_TORCHRL_TENSOR}:
        reason = f"rows with {', '.join(leaves)} that are no tensordicts: a table stores tensordicts and tensors"
        raise InvalidRequestError(argument="path", reason=reason)
    shape, dtype = leaves[_TORCHRL_TENSOR]["shape"], leaves[_TORCHRL_TENSOR]["dtype"]
    return MemoryMappedTensor.from_filename(
        path / f"{_TORCHRL_TENSOR}.memmap", dtype=getattr(torch, dtype.removeprefix("torch.")), shape=torch.Size(shape)
    )
