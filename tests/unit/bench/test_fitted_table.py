"""Tables fit every terminal, and nothing of them is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tdserve.bench.fitted_table import TableColumn, print_fitted

COLUMNS = (
    TableColumn("measured", 12),
    *map(TableColumn, ("median", "its median", "p99/op")),
    TableColumn("target", 10),
    *map(TableColumn, ("control CPU", "workers CPU", "client CPU")),
)
ROWS = (
    ("sample 256, one by one", "1.28 Mrows/s", "2.56 Mrows/s", "200 us", ">= 1,000,000 met", "18", "616", "5,892"),
    ("", "", "7.77 GB/s", "", "< 450 us not met", "", "", ""),
    ("extend 64", "3 us", "", "4 ms", "", "1", "", ""),
)
WORDS = {word for row in ROWS for cell in row for word in cell.split()}


def show(width: int, *, is_terminal: bool = True, title: str = "transitions") -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    print_fitted(console, COLUMNS, ROWS, title=title)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [*range(28, 130, 3), 200])
def test_table_when_the_terminal_has_any_width_then_fits_and_every_word_is_there(width: int) -> None:
    lines = show(width)
    assert max(map(len, lines)) <= width
    assert set(" ".join(lines).split()) >= WORDS


def test_table_when_the_terminal_is_wide_then_is_one() -> None:
    lines = show(200)
    assert len(lines) == 6  # the title, headings, a line, the rows
    assert [cell.strip() for cell in lines[3].split("│")] == [*ROWS[0]]


def test_table_when_the_terminal_is_narrower_then_is_divided_and_each_part_names_the_rows() -> None:
    lines = show(80)
    assert sum(line.startswith("measured") for line in lines) == 2
    assert sum(line.startswith("extend 64") for line in lines) == 2
    second = lines[[line.startswith("measured") for line in lines].index(True, 3) :]
    assert not any(line.startswith(" ") for line in second[2:]), "a row that continues has nothing there"


def test_table_when_the_terminal_is_very_narrow_then_has_a_record_for_each_row() -> None:
    assert [line.strip() for line in show(40)] == [
        "transitions",
        "sample 256, one by one",
        "median      1.28 Mrows/s",
        "its median  2.56 Mrows/s",
        "p99/op      200 us",
        "target      >= 1,000,000 met",
        "control CPU 18",
        "workers CPU 616",
        "client CPU  5,892",
        "its median  7.77 GB/s",
        "target      < 450 us not met",
        "extend 64",
        "median      3 us",
        "p99/op      4 ms",
        "control CPU 1",
    ]


@pytest.mark.parametrize("width", [20, 80])
def test_table_when_it_goes_into_a_file_then_no_line_is_folded(width: int) -> None:
    title = "one figure after the other, as they were measured"
    lines = show(width, is_terminal=False, title=title)
    assert lines[0] == title
    assert len(lines) == 6
    assert [cell.strip() for cell in lines[3].split("│")] == [*ROWS[0]]


def test_table_when_it_has_no_headings_then_shows_none() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    print_fitted(console, (TableColumn("", 10), TableColumn("")), [("calls", "3")])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split() == ["calls", "│", "3"]
