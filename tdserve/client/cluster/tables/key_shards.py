"""The shards of rows that choose them by the value of a key."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.placement import hash_to_shard
from tdserve.structure.tensors.torch_types import to_torch, view_bytes
from tdserve.structure.trees.tree import Path, Spec


class KeyShards:
    """Chooses the shards of rows by a key: equal values have the same shard, in whatever dtype they are given.

    Values of a key that is no tensor are compared with their kind: ``1``, ``1.0`` and ``True`` are three
    values. Scalars of NumPy are what they contain, and ``-0.0`` is ``0.0``.

    Args:
        path: The key.
        spec: Structure of one row.
        num_shards: Shards of the table.
    """

    def __init__(self, path: Path, spec: Spec, num_shards: int) -> None:
        self._path, self._num_shards = path, num_shards
        leaf = dict(spec.tensors).get(path)
        self._dtype = None if leaf is None else to_torch(leaf.dtype)

    def choose(self, rows: Any) -> NDArray[np.int64]:
        """Returns the shard of each row.

        Raises:
            InvalidRequestError: The rows lack the key.
        """
        values, num_rows = self._find(rows), rows.batch_size[0]
        if isinstance(values, torch.Tensor):
            distinct, inverse = np.unique(self._encode(values, num_rows), axis=0, return_inverse=True)
            shards = np.array([hash_to_shard(row.tobytes(), self._num_shards) for row in distinct])
            return shards[inverse.reshape(-1)]
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
        return np.array([self._hash_value(value) for value in listed])

    def choose_one(self, row: Any) -> int:
        """Returns the shard of one row without a dimension for rows; a tensordict, or a dict.

        Raises:
            InvalidRequestError: It lacks the key.
        """
        value = self._find(row)
        if self._dtype is None:
            return self._hash_value(value.tolist() if hasattr(value, "tolist") else value)
        return hash_to_shard(self._encode(torch.as_tensor(value), 1).tobytes(), self._num_shards)

    def _find(self, rows: Any) -> Any:
        found = rows
        for part in self._path:
            found = found.get(part, None) if hasattr(found, "get") else None
        if found is None:
            reason = f"the rows lack {'.'.join(self._path)!r}, which chooses the shard of each"
            raise InvalidRequestError(argument="batch", reason=reason)
        return found

    def _encode(self, values: torch.Tensor, num_rows: int) -> NDArray[np.uint8]:
        converted = values.detach().to("cpu", self._dtype).contiguous()
        if converted.is_floating_point() or converted.is_complex():
            converted = converted + 0.0  # makes 0.0 of -0.0
        encoded: NDArray[np.uint8] = view_bytes(converted).view(num_rows, -1).numpy()
        return encoded

    def _hash_value(self, value: Any) -> int:
        plain = value.item() if isinstance(value, np.generic) else value
        plain = plain + 0.0 if isinstance(plain, (float, complex)) else plain
        return hash_to_shard(repr(plain).encode(), self._num_shards)
