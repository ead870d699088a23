"""The places of rows in the leaves of a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows, decode_rows, find_run, is_run


class Places:
    """The places of rows, as an index: a slice if they are consecutive, which is copied in one piece.

    Args:
        run: First of consecutive rows.
        rows: Numbers of other rows.
    """

    def __init__(self, run: int = 0, rows: Rows | None = None) -> None:
        self._run = run
        self._rows = rows

    @classmethod
    def decode(cls, encoded: bytes) -> Places:
        """Reads the rows of a message."""
        run = find_run(encoded)
        return cls(rows=decode_rows(encoded)) if run is None else cls(run[0])

    def get_part(self, first: int, num_rows: int) -> slice | NDArray[np.int64]:
        """Returns the index of ``num_rows`` of them."""
        if self._rows is None:
            start = self._run + first
            return slice(start, start + num_rows)
        rows = self._rows[first : first + num_rows]
        return slice(int(rows[0]), int(rows[0]) + num_rows) if num_rows and is_run(rows) else rows
