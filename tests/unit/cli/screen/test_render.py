"""tdserve/cli/screen/render.py: nothing that a terminal obeys or JSON refuses gets through."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console
from rich.table import Table

from tdserve.cli.screen.render import (
    MAX_CELL,
    MAX_CHAT,
    escape_unprintable,
    format_cell,
    format_count,
    format_key,
    format_nbytes,
    print_json,
    print_json_lines,
    print_lines,
    print_table,
    print_whole,
    to_one_line,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("obs", "obs"), ("a b", "a b"), ("ü日", "ü日"), ("\x1b[0m", "\\x1b[0m"), ("\ud800", "\\ud800"), ("\x9b", "\\x9b")],
)
def test_printable_when_text_has_control_characters_then_escapes_only_those(text: str, shown: str) -> None:
    assert escape_unprintable(text) == shown


@given(st.text(st.characters(codec=None)))
def test_printable_when_given_any_text_then_result_is_printable_and_encodable(text: str) -> None:
    assert escape_unprintable(text).isprintable()
    assert escape_unprintable(text).encode().decode() == escape_unprintable(text)


def test_one_line_when_text_has_line_feeds_then_joins_them() -> None:
    assert to_one_line("lost peer:\n  reason\r\n") == "lost peer: reason"


def test_key_text_when_nested_then_differs_from_a_dotted_root_key() -> None:
    assert format_key("next.obs") == "next.obs"
    assert format_key(("next", "obs")) == "('next', 'obs')"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1_023_900, "0.976 MiB"),
        (256 << 20, "256 MiB"),
        (5 << 50, "5 PiB"),
    ],
)
def test_nbytes_text_when_shown_then_has_three_digits_and_a_unit(nbytes: int, shown: str) -> None:
    assert format_nbytes(nbytes) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (9_999, "9999"), (12_345, "12.3k"), (999_499, "999k"), (999_999, "1M"), (1 << 63, "9.22E")],
)
def test_count_text_when_large_then_has_three_digits_and_a_unit(count: int, shown: str) -> None:
    assert format_count(count) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.1235"),
        (True, "True"),
        (None, "None"),
        ("a\x1bb", "'a\\x1bb'"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, …]"),
        ([[1.0, 2.5]], "[[1, 2.5]]"),
        (torch.arange(9), "[0, 1, 2, 3, …]"),
        (torch.tensor(2.5, dtype=torch.bfloat16), "2.5"),
        (np.array(["a", "b"]), "['a', 'b']"),
        (1 + 2j, "(1+2j)"),
        ([{"role": "user", "content": "hi\nyou\x1b"}] * 2, "user: hi you\\x1b | user: hi you\\x1b"),
        ({"id": 3, "messages": [{"role": "user", "content": "hello"}]}, "id: 3 | user: hello"),
    ],
)
def test_value_text_when_shown_then_is_short(value: Any, shown: str) -> None:
    assert format_cell(value) == shown


def test_value_text_when_value_is_huge_then_fits_a_cell_and_reads_only_its_corner() -> None:
    endless = torch.zeros(1).expand(1 << 40, 1 << 20)  # 2^60 elements over 4 bytes of memory
    assert len(format_cell(endless)) == MAX_CELL


def test_value_text_when_a_chat_is_long_then_its_beginning() -> None:
    shown = format_cell([{"role": "user", "content": "x" * 1_000_000}] * 1_000)
    assert shown == f"user: {'x' * (MAX_CHAT - 7)}…"


def test_print_json_when_values_are_not_json_then_prints_a_substitute(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"nan": math.nan, "big": 2**70, "raw": b"\x01", "c": 1 + 2j, "t": torch.ones(2), "s": "\ud800", 3: {4}}
    print_json(document)
    assert json.loads(capsys.readouterr().out) == {
        "nan": "nan",
        "big": 2**70,
        "raw": "01",
        "c": [1.0, 2.0],
        "t": [1.0, 1.0],
        "s": "\ud800",
        "3": [4],
    }


def test_print_table_when_piped_then_one_line_per_row_and_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "size"), [("[red]a[/red]", "1"), ("b" * 300, "22")], right=("size",))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["name", "size"], ["[red]a[/red]", "1"], ["b" * 300, "22"]]


def test_print_whole_when_a_terminal_is_narrow_then_long_cells_fold_and_nothing_is_lost() -> None:
    console = Console(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
    table = Table("name", box=None)
    table.add_column("rows", no_wrap=True)
    table.add_column("age", no_wrap=True)
    table.add_row("a-name-that-is-long-" * 3, "123456789012", "3600 s")
    print_whole(console, table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "123456789012" in lines[1]
    assert "3600 s" in lines[1]
    assert "".join(line.split()[0] for line in lines[1:]) == "a-name-that-is-long-" * 3
    assert console.width == 30


def test_print_table_when_a_terminal_is_narrow_then_no_figure_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "30")
    row = ("a", "tensordict", "503", "2.03 KiB", "26 min 58 s")
    print_table(("name", "kind", "rows", "size", "age"), [row], right=("rows", "size"))
    header, shown = capsys.readouterr().out.splitlines()
    assert all(cell in shown for cell in row)
    assert "size" in header


def test_print_table_when_piped_then_no_line_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("topic", "about"), [("a", "short"), ("b", "something that is longer")])
    assert capsys.readouterr().out.splitlines() == ["topic  about", "a      short", "b      something that is longer"]


def test_print_whole_when_a_name_is_one_long_word_then_it_folds_within_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    table = Table("name", box=None)
    table.add_column("rows", no_wrap=True)
    table.add_row("n" * 200, "123456789012")
    print_whole(console, table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "123456789012" in lines[1]
    assert sum(line.count("n") for line in lines[1:]) == 200


class CountingOutput(io.StringIO):
    """Counts how often output is passed on: between two of these, its reader may go away."""

    num_flushes = 0

    def flush(self) -> None:
        """Counts."""
        self.num_flushes += 1


def test_lines_when_printed_then_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    output = CountingOutput()
    monkeypatch.setattr("sys.stdout", output)
    print_lines(["a\x1b", "b"])
    print_lines([])
    assert (output.getvalue(), output.num_flushes) == ("a\\x1b\nb\n", 1)
    print_json_lines([{"a": 1}, [2]])
    assert output.getvalue().endswith('\nb\n{"a": 1}\n[2]\n')
    assert output.num_flushes == 2
