"""Tables within the width of a terminal: columns are left out and names are cut there, figures never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from tdserve.cli.screen.render import escape_unprintable

GAP = 2
"""Spaces between two columns."""


class Narrowing(NamedTuple):
    """What a table does with too little room.

    Attributes:
        names: Columns of names, each with the width down to which its cells may be cut.
        texts: Other columns that are no numbers.
        left_out: Columns that may be left out, the least important one first.
    """

    names: Mapping[str, int]
    texts: Sequence[str] = ()
    left_out: Sequence[str] = ()


def make_narrow_table(columns: Sequence[str], rows: Sequence[Sequence[str]], narrowing: Narrowing, width: int) -> Table:
    """Returns a table of at most ``width`` characters, escaped.

    Columns are left out until the figures have room beside names of their smallest width: first those that are empty,
    then by ``narrowing.left_out``. Names share the room that is left.
    """
    cells = {title: [escape_unprintable(row[at]) for row in rows] for at, title in enumerate(columns)}
    widths = {title: max(map(cell_len, (title, *found))) for title, found in cells.items()}

    def find_least(title: str) -> int:
        return (
            min(widths[title], max(narrowing.names[title], len(title))) if title in narrowing.names else widths[title]
        )

    kept = list(columns)
    for title in sorted(filter(cells.__contains__, narrowing.left_out), key=lambda title: any(cells[title])):
        if sum(map(find_least, kept)) + GAP * (len(kept) - 1) <= width:
            break
        kept.remove(title)
    spare = width - GAP * (len(kept) - 1) - sum(map(find_least, kept))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title in kept:
        room = find_least(title) + min(max(spare, 0), widths[title] - find_least(title))
        spare -= room - find_least(title)
        is_text = title in narrowing.names or title in narrowing.texts
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True, min_width=room)
        cells[title] = [cut_middle(cell, room) for cell in cells[title]]
    for at in range(len(rows)):
        table.add_row(*(Text(cells[title][at]) for title in kept))
    return table


def cut_middle(text: str, width: int) -> str:
    """Cuts a text to this many columns of a terminal: beginning and end stay, in which names differ."""
    if cell_len(text) <= width:
        return text
    num_last = (width - 1) // 2
    return f"{set_cell_size(text, width - 1 - num_last)}…{set_cell_size(text[::-1], num_last)[::-1]}"
