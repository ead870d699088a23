"""How things look in a terminal and as JSON. Imports neither clients nor commands.

Keys and values come from other processes. So characters that a terminal would obey (escape sequences, controls) or an
output encoding would refuse (surrogates) are shown escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tdserve.cli.screen.chats import find_messages

UNFOLDED_COLUMNS = 10_000
"""Width of a table that goes into a pipe or a file, where a folded row would be two lines for ``grep``."""

SHORT_COLUMNS = 16
"""Columns of this width are never folded: numbers, kinds and headers stay readable in a narrow terminal."""

MAX_ITEMS = 4
"""Elements of a tensor shown per dimension: enough to recognise an observation, little enough for five rows abreast."""

MAX_CELL = 40
"""Characters of one value in a table."""

MAX_CHAT = 240
"""Characters of a chat in a table: room for its first messages."""

MAX_TEXT = 4096
"""Characters of one text, of whatever length: a key or a message may have a million."""


def escape_unprintable(text: str) -> str:
    """Escapes everything in ``text`` that is not printable, as Python does: controls, escape sequences, characters that
    turn the direction of text. Cuts what is longer than ``MAX_TEXT``."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text):,} characters)"
    return escape_long(text)


def escape_long(text: str) -> str:
    """Escapes as ``escape_unprintable`` does, and cuts nothing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def to_one_line(text: str) -> str:
    """Puts ``text`` on one line."""
    return escape_unprintable(" ".join(text[: 2 * MAX_TEXT].split()))


def format_key(key: str | Sequence[str]) -> str:
    """Shows a key as ``store[...]`` takes it: bare at the root, a tuple if nested, so that dots stay unambiguous."""
    return escape_unprintable(key) if isinstance(key, str) else escape_unprintable(repr(tuple(key)))


def format_nbytes(nbytes: int) -> str:
    """Shows a number of bytes with a binary unit and three digits."""
    amount, unit = _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    return f"{nbytes} B" if unit == "B" else f"{amount:.3g} {unit}"


def format_count(count: int) -> str:
    """Shows a count in at most five characters: exactly below 10,000, from there with three digits, as in ``1.23M``."""
    amount, unit = _scale(count, 1000, ("", "k", "M", "G", "T", "P", "E"))
    return str(count) if count < 10_000 else f"{amount:.3g}{unit}"


def format_duration(seconds: float) -> str:
    """Shows a number of seconds with its largest unit and the next: ``2 d 3 h``, ``5 min 1 s``, ``7 s``."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // part} {smaller}"
    return f"{whole} s"


def format_cell(value: Any) -> str:
    """Shows a tensor, a value or nested lists of values, shortened to fit a table's cell; a chat as its messages."""
    messages = find_messages(value)
    if messages is not None:
        chat = " | ".join(f"{to_one_line(role)}: {to_one_line(content)}" for role, content in messages)
        return chat if len(chat) <= MAX_CHAT else f"{chat[: MAX_CHAT - 1]}…"
    text = _shorten(_cut_corner(value))
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Prints rows under a header, all escaped; the columns named in ``right`` are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns, cells = list(map(escape_unprintable, columns)), [list(map(escape_unprintable, row)) for row in rows]
    for number, column in enumerate(columns):
        is_number = column in right
        longest = max(cell_len(text) for text in (column, *(row[number] for row in cells)))
        is_whole = is_number or longest <= SHORT_COLUMNS  # rich would cut such a column, at a blank too
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_whole,
            min_width=longest if is_whole else SHORT_COLUMNS,
        )
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    print_whole(Console(highlight=False), table)


def print_whole(console: Console, table: Table) -> None:
    """Prints a table without cutting anything: unfolded in a pipe, wider than the terminal where that is too narrow."""
    for column in table.columns:
        column.overflow = "fold"
    before = console.width
    console.width = UNFOLDED_COLUMNS
    if console.is_terminal:
        foldable = [(column, column.max_width) for column in table.columns if not column.no_wrap]
        for column, widest in foldable:  # one long word must not make the table wider than the terminal
            column.max_width = min(widest or SHORT_COLUMNS, SHORT_COLUMNS)
        console.width = max(before, console.measure(table).minimum)
        for column, widest in foldable:
            column.max_width = widest
    with console.capture() as shown:
        console.print(table, crop=False)
    lines = shown.get().splitlines()  # each is padded to the width
    console.file.write("".join(f"{line if console.is_terminal else line.rstrip()}\n" for line in lines))
    console.width = before


def print_lines(lines: Iterable[str]) -> None:
    """Prints one thing per line, escaped and not cut.

    All are written at once: a reader that ends after the first line, such as ``head -1``, is then no error of ours.
    """
    if shown := [escape_long(line) for line in lines]:
        click.echo("\n".join(shown))


def print_json(document: Any) -> None:
    """Prints one JSON document on one line, in ASCII."""
    print_json_lines([document])


def print_json_lines(documents: Iterable[Any]) -> None:
    """Prints one JSON document per line, all at once as ``print_lines`` does."""
    print_lines(json.dumps(to_jsonable(document), allow_nan=False) for document in documents)


def to_jsonable(value: Any) -> Any:
    """Converts a value for JSON: tensors and arrays to nested lists, nan and infinities to strings, bytes to hex."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [to_jsonable(value.real), to_jsonable(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    return str(value)


def _scale(amount: float, factor: int, units: Sequence[str]) -> tuple[float, str]:
    """Returns an amount in the unit in which three digits show it."""
    at = 0
    while amount >= 999.5 and at < len(units) - 1:
        amount, at = amount / factor, at + 1
    return amount, units[at]


def _cut_corner(value: Any) -> Any:
    """Cuts a tensor to what is shown and one more per dimension: it may have a hundred million elements."""
    if not (hasattr(value, "tolist") and hasattr(value, "ndim")):
        return value
    return value[(slice(MAX_ITEMS + 1),) * value.ndim].tolist()


def _shorten(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (str, bytes)):
        value = value[: MAX_CELL + 1]
    if isinstance(value, (list, tuple)):
        shown = [_shorten(item) for item in value[:MAX_ITEMS]]
        return f"[{', '.join([*shown, '…'] if len(value) > MAX_ITEMS else shown)}]"
    return escape_unprintable(str(value) if isinstance(value, (int, complex)) else repr(value))
