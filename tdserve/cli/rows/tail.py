"""``tdserve tail NAME``: the newest rows of a store, and those that come."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tdserve.base.errors import DeadlineExceededError, NotSupportedError, TransportError
from tdserve.cli.rows.first_rows import iter_columns, nest_leaves
from tdserve.cli.rows.new_rows import LatestRows, NewRows
from tdserve.cli.screen.render import escape_unprintable, format_cell, format_key, print_json_lines, print_lines
from tdserve.cli.shell.held_warnings import show_warnings
from tdserve.cli.shell.number_types import TimeRange
from tdserve.cli.shell.options import Inquiry, ask_server, report_left_out, take_store
from tdserve.cli.stores.version_list import COLUMNS, make_version_cells

if TYPE_CHECKING:
    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient

Look = Callable[[bool], list[tuple[str, Any]]]
"""Returns what is new as lines and JSON objects; the first time what is newest."""


@click.command()
@take_store
@click.option(
    "-n",
    "num_rows",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Rows to show first; of a shared store, of each shard.",
)
@click.option("-f", "--follow", is_flag=True, help="Show what is written, until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=TimeRange(min=0.05),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@ask_server
def tail(inquiry: Inquiry, name: str, *, num_rows: int, follow: bool, interval_s: float) -> int:
    """Show the newest rows of store NAME, one per line: of a table, of a tensordict; of weights the versions.

    A terminal shows as much of a line as fits; a pipe gets all of it.

    With --json each line is a JSON document. With --follow the newest rows are shown as they are written, up to 1000 at
    a time; of a tensordict its last rows, again after each change. Nothing counts as sampled.
    """
    with inquiry.connect() as client:
        look = _make_look(client, name, num_rows)
        _print(inquiry, look(True))
        if follow:
            _follow(inquiry, look, interval_s)
        return report_left_out(client, name)


def _follow(inquiry: Inquiry, look: Look, interval_s: float) -> None:
    is_lost = False
    show_warnings()
    while True:
        time.sleep(interval_s)
        try:
            found = look(False)
        except (TransportError, DeadlineExceededError) as error:
            if not error.retryable:
                raise
            if not is_lost:
                click.echo(f"tdserve: waits for the server: {escape_unprintable(str(error))}", err=True)
            is_lost = True
            continue
        is_lost = False
        _print(inquiry, found)


def _print(inquiry: Inquiry, found: list[tuple[str, Any]]) -> None:
    if inquiry.as_json:
        print_json_lines(document for _, document in found)
    else:
        console = Console()
        columns = console.width if console.is_terminal else math.inf
        print_lines(line if len(line) <= columns else f"{line[: console.width - 1]}…" for line, _ in found)
    sys.stdout.flush()


def _make_look(client: Client | ClusterClient, name: str, num_rows: int) -> Look:
    described = client.describe(name)
    if described.kind == "weights":
        return _look_at_versions(client, name, num_rows)
    if described.capacity:
        table = client[name]
        return _look_at_parts(table, num_rows) if hasattr(table, "ask_parts") else _look_at_table(table, num_rows)
    if described.kind == "keyed" or not described.batch_size:
        what = "entries of a keyed store" if described.kind == "keyed" else "a store without rows"
        raise NotSupportedError(feature=f"the tail of {what}", reason="there is no order; tdserve head shows some")
    return _look_at_rows(client, name, num_rows)


def _look_at_table(table: Any, num_rows: int) -> Look:
    new_rows = NewRows(table)
    return lambda is_first: _list_lines(new_rows.take_last(num_rows) if is_first else new_rows.take_new())


def _look_at_parts(table: Any, num_rows: int) -> Look:
    """Looks at the parts of a table that several servers share, as far as they answer."""
    seen: dict[int, NewRows] = {}

    def look_at(shard: int, part: Any) -> LatestRows:
        if shard in seen:
            return seen[shard].take_new()
        new_rows = NewRows(part, shard * table.part_capacity)
        found = new_rows.take_last(num_rows)
        seen[shard] = new_rows
        return found

    def look(is_first: bool) -> list[tuple[str, Any]]:
        found = table.ask_parts(range(table.num_shards), look_at)
        return [line for shard in sorted(found) for line in _list_lines(found[shard])]

    return look


def _list_lines(found: LatestRows) -> list[tuple[str, Any]]:
    left_out = found.num_left_out
    more = [(f"... {left_out:,} rows are left out", {"left_out": left_out})] if left_out else []
    if found.rows is None:
        return more
    lines = _make_row_lines(found.rows, found.numbers)
    return [*more, *zip(lines, _make_row_documents(found.rows, found.numbers), strict=True)]


def _look_at_rows(client: Client | ClusterClient, name: str, num_rows: int) -> Look:
    from tdserve.structure.tensordicts.instances import allow_unknown_classes  # imports torch

    shown = -1

    def look(is_first: bool) -> list[tuple[str, Any]]:
        nonlocal shown
        described = client.describe(name)
        if described.version == shown:
            return []
        shown = described.version
        begin = max(described.batch_size[0] - num_rows, 0)
        with allow_unknown_classes():
            rows = client[name][begin:]
        numbers = range(begin, begin + len(rows))
        return list(zip(_make_row_lines(rows, numbers), _make_row_documents(rows, numbers), strict=True))

    return look


def _look_at_versions(client: Client | ClusterClient, name: str, num_rows: int) -> Look:
    newest = 0

    def look(is_first: bool) -> list[tuple[str, Any]]:
        nonlocal newest
        found = [each for each in client.describe(name).versions if is_first or each.version > newest]
        newest = max([newest, *(each.version for each in found)])
        return [
            (
                "  ".join(f"{column} {cell}" for column, cell in zip(COLUMNS, make_version_cells(each), strict=True)),
                asdict(each),
            )
            for each in (found[-num_rows:] if is_first else found)
        ]

    return look


def _make_row_lines(rows: Any, numbers: Sequence[int]) -> list[str]:
    """Returns ``row NUMBER  key value  key value ...`` of each row of a tensordict."""
    columns = list(iter_columns(rows))
    keys = [format_key(each.path[0] if len(each.path) == 1 else each.path) for each in columns]
    lines = []
    for at, number in enumerate(numbers):
        cells = [format_cell(each.value[at] if each.is_per_row else each.value) for each in columns]
        lines.append("  ".join([f"row {number}", *map(" ".join, zip(keys, cells, strict=True))]))
    return lines


def _make_row_documents(rows: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Returns ``{"row": NUMBER, "data": {...}}`` of each row of a tensordict."""
    columns = list(iter_columns(rows))
    return [
        {
            "row": number,
            "data": nest_leaves(each._replace(value=each.value[at]) if each.is_per_row else each for each in columns),
        }
        for at, number in enumerate(numbers)
    ]
