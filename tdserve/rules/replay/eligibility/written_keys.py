"""Records which keys of each row have been written, for rows whose keys arrive separately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns

_BITS = 64


class WrittenKeys:
    """One bit per key and row, in ``columns`` under the name ``written``.

    Keys are numbers below ``num_keys``; the owner of the table knows their names. Every operation is vectorised over
    the rows.

    Args:
        columns: Columns of the table.
        num_keys: Keys per row.
    """

    def __init__(self, columns: RowColumns, num_keys: int) -> None:
        self._num_keys = num_keys
        width = max(1, -(-num_keys // _BITS))
        self._words: NDArray[np.uint64] = np.asarray(columns.get_array("written", np.uint64, width))

    def __repr__(self) -> str:
        return f"<Written {self._num_keys} keys of {len(self._words)} rows>"

    def reset(self, rows: Rows, keys: Sequence[int] | None = None) -> None:
        """Records rows that were committed: exactly these keys of them are written; ``None``: all.

        Raises:
            LocalProtocolError: A key does not exist. Nothing was changed.
        """
        self._words[rows] = self._mask(range(self._num_keys) if keys is None else keys)

    def mark_all(self) -> None:
        """Records that all keys of all rows are written."""
        self._words[:] = self._mask(range(self._num_keys))

    def mark(self, rows: Rows, keys: Sequence[int]) -> Rows:
        """Records that these keys of the rows were written as well.

        Returns:
            Those of ``rows`` for which at least one of the keys is new, in their order.

        Raises:
            LocalProtocolError: A key does not exist. Nothing was changed.
        """
        mask = self._mask(keys)
        before = self._words[rows]
        after = before | mask
        self._words[rows] = after
        is_new: NDArray[np.bool_] = (before != after).any(axis=1)
        return rows[is_new]

    def has(self, rows: Rows, keys: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which of the rows have all these keys.

        Raises:
            LocalProtocolError: There is no such key.
        """
        mask = self._mask(keys)
        has_all: NDArray[np.bool_] = (self._words[rows] & mask == mask).all(axis=1)
        return has_all

    def has_any(self, rows: Rows, keys: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which of the rows have at least one of these keys. Raises as ``has`` does."""
        has_some: NDArray[np.bool_] = (self._words[rows] & self._mask(keys) != 0).any(axis=1)
        return has_some

    def count_missing(self, rows: Rows) -> NDArray[np.int64]:
        """Returns in how many of the rows each key has not been written, by the key's number."""
        octets = self._words[rows].astype("<u8").view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=self._num_keys, bitorder="little")
        return np.asarray(len(rows) - bits.sum(axis=0, dtype=np.int64), np.int64)

    def _mask(self, keys: Sequence[int]) -> NDArray[np.uint64]:
        words = [0] * self._words.shape[1]
        for key in keys:
            if not 0 <= key < self._num_keys:
                raise LocalProtocolError(reason=f"key {key} is out of range: rows have {self._num_keys} keys")
            words[key // _BITS] |= 1 << key % _BITS
        return np.array(words, np.uint64)
