"""Rows as lines of text and as JSON objects, one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.cli.rows.first_rows import iter_columns, nest_leaves
from tdserve.cli.screen.render import format_cell, format_key


def make_row_lines(rows: Any, numbers: Sequence[int]) -> list[str]:
    """Returns ``row NUMBER  key value  key value ...`` of each row of a tensordict."""
    columns = list(iter_columns(rows))
    keys = [format_key(each.path[0] if len(each.path) == 1 else each.path) for each in columns]
    lines = []
    for at, number in enumerate(numbers):
        cells = [format_cell(each.value[at] if each.is_per_row else each.value) for each in columns]
        lines.append("  ".join([f"row {number}", *map(" ".join, zip(keys, cells, strict=True))]))
    return lines


def make_row_documents(rows: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Returns ``{"row": NUMBER, "data": {...}}`` of each row of a tensordict."""
    columns = list(iter_columns(rows))
    return [
        {
            "row": number,
            "data": nest_leaves(each._replace(value=each.value[at]) if each.is_per_row else each for each in columns),
        }
        for at, number in enumerate(numbers)
    ]
