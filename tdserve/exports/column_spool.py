"""Rows that are read piece by piece, as one temporary file for each key: memory does not limit them."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from tdserve.base.errors import NotSupportedError
from tdserve.exports.content_columns import Columns, Key
from tdserve.structure.tensors.torch_types import view_bytes


class ColumnSpool:
    """Collects rows. A context manager; the files go when the folder does.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Key, tuple[IO[bytes], torch.dtype, torch.Size]] = {}
        self._values: dict[Key, list[Any]] = {}
        self.num_rows = 0

    def append(self, columns: Columns, num_rows: int) -> None:
        """Adds the next rows, which have the keys of those before."""
        for key, value in columns.items():
            if not isinstance(value, torch.Tensor):
                self._values.setdefault(key, []).extend(value)
                continue
            if key not in self._files:
                made: IO[bytes] = open(self._folder / str(len(self._files)), "w+b")  # noqa: SIM115 (open until __exit__)
                self._files[key] = made, value.dtype, value.shape[1:]
            file, dtype, shape = self._files[key]
            if (value.dtype, value.shape[1:]) != (dtype, shape):
                reason = f"{'/'.join(key)} has changed from {dtype} {list(shape)} while it was read"
                raise NotSupportedError(feature="this export", reason=reason)
            content: Any = view_bytes(value.contiguous()).numpy()
            file.write(content)
        self.num_rows += num_rows

    def finish(self) -> Columns:
        """Returns all rows; tensors are mapped."""
        found: Columns = dict(self._values)
        for key, (file, dtype, shape) in self._files.items():
            file.flush()
            size = torch.Size([self.num_rows, *shape])
            if not size.numel():  # nothing can be mapped
                found[key] = torch.empty(size, dtype=dtype)
                continue
            content: Any = np.memmap(file, np.uint8, "r+")
            found[key] = torch.from_numpy(content).view(dtype).reshape(size)
        return found

    def __enter__(self) -> ColumnSpool:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._files.values():
            opened[0].close()
