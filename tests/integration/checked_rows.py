"""Rows with their writer, their number, and a checksum over all keys that shows whether they are whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

MAX_NUMBERS = 1 << 20
"""Rows of one writer."""


def example(num_floats: int) -> TensorDict:
    """Returns a row, for its structure."""
    td: TensorDict = checked_rows(0, 0, 1, num_floats)[0]
    return td


def checked_rows(writer: int, start: int, num_rows: int, num_floats: int) -> TensorDict:
    """Returns rows ``start`` and following of a writer."""
    number = np.arange(start, start + num_rows)
    rng = np.random.default_rng((writer, start))
    body = rng.random((num_rows, num_floats), np.float32)
    pixels = rng.integers(0, 256, (num_rows, 40), np.uint8)
    leaves = {"writer": np.full(num_rows, writer), "number": number, "body": body, "pixels": pixels}
    check = _checksum(leaves)
    return TensorDict(
        {
            "writer": torch.from_numpy(leaves["writer"]),
            "number": torch.from_numpy(number),
            "body": torch.from_numpy(body),
            "next": {"pixels": torch.from_numpy(pixels), "check": torch.from_numpy(check)},
        },
        [num_rows],
    )


def checked_ids(td: Any) -> NDArray[np.int64]:
    """Returns writer and number of each row as one number. Fails if a row is torn."""
    leaves = {
        "writer": td["writer"].numpy(),
        "number": td["number"].numpy(),
        "body": td["body"].numpy(),
        "pixels": td["next", "pixels"].numpy(),
    }
    is_whole = _checksum(leaves) == td["next", "check"].numpy()
    assert is_whole.all(), f"{int((~is_whole).sum())} of {len(td)} rows are torn"
    return np.asarray(leaves["writer"] * MAX_NUMBERS + leaves["number"])


def _checksum(leaves: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Returns checksums that change with every byte of a row: odd weights, modulo 2^64."""
    num_rows = len(leaves["number"])
    content = [np.ascontiguousarray(leaf).reshape(num_rows, -1).view(np.uint8) for leaf in leaves.values()]
    table = np.concatenate(content, axis=1)
    table = np.pad(table, ((0, 0), (0, -table.shape[1] % 8))).view(np.uint64)
    weights = 2 * np.random.default_rng(7).integers(1, 1 << 62, table.shape[1], np.uint64) + np.uint64(1)
    return np.asarray((table * weights).sum(axis=1, dtype=np.uint64).view(np.int64))
