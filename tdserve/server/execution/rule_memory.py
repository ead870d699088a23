"""Memory of the rules of very large tables, which the control process takes per row of capacity."""

from __future__ import annotations

from tdserve.base.errors import CapacityError
from tdserve.base.machine import read_available_bytes

ROW_BYTES = 32
"""Of one table, per row: where it is among the live rows, its priority, when it was written (measured: 16 to 30)."""

CONDITION_ROW_BYTES = 64
"""Of the rows that one kind of condition may draw, with their groups."""

KEPT_SHARE = 2
"""One table may take the available memory divided by this: the kernel would kill a process that takes all of it."""


def check_rule_memory(num_rows: int, row_bytes: int) -> None:
    """Checks whether there is memory for the rules of this many rows.

    Raises:
        CapacityError: There is not.
    """
    asked, free = num_rows * row_bytes, read_available_bytes() // KEPT_SHARE
    if asked > free:
        what = f"rules of {num_rows} rows, {row_bytes} bytes of the control process's memory each"
        raise CapacityError(what=what, asked=asked, free=free)
