"""Prints tables that fit the terminal: as one, as a few below each other, or as records of a line for each cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tdserve.cli.screen.render import print_whole

MAX_TABLES = 3
"""A table is divided into this many at most. Where more would be needed, records read better."""

GAP = len(" │ ")
"""Columns between two cells."""


class TableColumn(NamedTuple):
    """A column of a table.

    Attributes:
        heading: Its name; its words may stand below each other.
        min_width: Columns of the terminal that text needs at least, where it may be wrapped; None for numbers, which
            stand at the right and are never wrapped.
    """

    heading: str
    min_width: int | None = None


def print_fitted(
    console: Console, columns: Sequence[TableColumn], rows: Iterable[Sequence[Text | str]], *, title: str = ""
) -> None:
    """Prints a table without cutting anything.

    A file or a pipe gets one table with unfolded lines, however long they are. On a terminal that is too narrow, the
    table is divided by columns, and each part repeats the first one; where that would be more than ``MAX_TABLES``, each
    row becomes a record with one line for each cell.

    Args:
        console: Where to print.
        columns: The first one names the rows. No heading is shown where all of them are empty.
        rows: The cells of each row. A row without a name continues the row above.
        title: Stands above.
    """
    lines = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if title:
        console.print(Text(title, style="italic"), soft_wrap=not console.is_terminal)
    if not console.is_terminal:
        table = _make_table(columns, lines)
        for column in table.columns:
            column.no_wrap = True
        print_whole(console, table)
        return
    tables = _divide(columns, lines, console.width)
    if tables is None:
        _print_records(console, columns, lines)
        return
    for number, shown in enumerate(tables):
        if number:
            console.print()
        cells = [[row[at] for at in shown] for row in lines]
        kept = [row for row in cells if any(row)]
        part = [columns[at] for at in shown]
        widths = _widen(part, kept, console.width)
        console.print(_make_table(part, kept, widths))


def _divide(columns: Sequence[TableColumn], rows: Sequence[Sequence[Text]], width: int) -> list[list[int]] | None:
    """Returns the numbers of the columns of each table; None if they are too many, or a column is wider than all."""
    needed = [_measure_width(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    tables: list[list[int]] = [[0]]
    used = needed[0]
    for at in range(1, len(columns)):
        if used + GAP + needed[at] > width and len(tables[-1]) > 1:
            tables.append([0])
            used = needed[0]
        used += GAP + needed[at]
        if used > width:
            return None
        tables[-1].append(at)
    return tables if len(tables) <= MAX_TABLES else None


def _measure_width(column: TableColumn, cells: Iterable[Text]) -> int:
    """Returns the least width of a column."""
    heading = max(map(len, column.heading.split()), default=0)
    longest = max((cell.cell_len for cell in cells), default=0)
    return max(heading, longest if column.min_width is None else min(longest, column.min_width))


def _widen(columns: Sequence[TableColumn], rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Returns the widths of the columns of one table: what is left goes to texts and headings, from the left."""
    widths = [_measure_width(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    spare = width - sum(widths) - GAP * (len(widths) - 1)
    for at, column in enumerate(columns):
        longest = max((row[at].cell_len for row in rows), default=0)
        grown = min(max(longest, len(column.heading)), widths[at] + spare)
        spare -= grown - widths[at]
        widths[at] = grown
    return widths


def _make_table(
    columns: Sequence[TableColumn], rows: Iterable[Sequence[Text]], widths: Sequence[int] | None = None
) -> Table:
    table = Table(show_edge=False, pad_edge=False, show_header=any(column.heading for column in columns))
    for at, column in enumerate(columns):
        justify = "left" if column.min_width is not None else "right"
        width = None if widths is None else widths[at]
        table.add_column(column.heading, justify=justify, width=width, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def _print_records(console: Console, columns: Sequence[TableColumn], rows: Iterable[Sequence[Text]]) -> None:
    """Prints each row as its name, and below it a line for each cell that is not empty."""
    longest = max((len(column.heading) for column in columns[1:]), default=0)
    heading_width = max(min(longest, console.width // 2 - 2), 1)
    for row in rows:
        if row[0]:
            console.print(row[0], style="bold")
        record = Table.grid(
            Column(width=1), Column(width=heading_width, overflow="fold"), Column(overflow="fold"), padding=(0, 1)
        )
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                record.add_row("", column.heading, cell)
        console.print(record)
