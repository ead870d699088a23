"""``tdserve sessions``: the clients of a server, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console

from tdserve.cli.figures.server_figures import list_lost, open_figures
from tdserve.cli.screen.narrow_table import Narrowing, make_narrow_table
from tdserve.cli.screen.render import format_duration, format_nbytes, print_table, to_one_line
from tdserve.cli.shell.exit_codes import NO_ANSWER
from tdserve.cli.shell.options import Inquiry, ask_server
from tdserve.client.session.catalog.message_facts import to_facts

COLUMNS = (
    *("session", "host", "pid", "transport", "worker", "open", "requests", "errors", "in", "out", "under way"),
    "degraded",
)

NUMBERS = ("server", *COLUMNS[:1], *COLUMNS[2:3], *COLUMNS[4:11])

NARROWING = Narrowing(
    {"host": 12, "degraded": 12},
    ("transport",),
    ("worker", "under way", "open", "transport", "degraded", "errors", "out", "in", "pid", "requests"),
)


@click.command()
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="Most sessions to show."
)
@ask_server
def sessions(inquiry: Inquiry, *, limit: int) -> int:
    """List the open sessions, one for each connected client: its machine and process, transport and counts.

    Of several servers, those of each. "degraded" are stores of which the client reports that parts are out of reach.
    A narrow terminal shows fewer columns; --json and a pipe have all.
    """
    with open_figures(inquiry) as reader:
        found = reader.ask(max_stores=0, max_sessions=limit)
    lost = list_lost(found)
    for each in lost:
        click.echo(f"tdserve: server {each.server} does not answer: {to_one_line(str(each.fault))}", err=True)
    shown = [
        (each.server, flatten_session(session))
        for each in found
        if each.figures is not None
        for session in each.figures.sessions
    ]
    first = ("server",) if reader.is_of_cluster else ()
    rows = [(*([str(server)] if first else []), *make_session_cells(facts)) for server, facts in shown]
    inquiry.answer(
        [{"server": server, **facts} for server, facts in shown],
        lambda: _print_sessions((*first, *COLUMNS), rows),
    )
    return NO_ANSWER if lost else 0


def _print_sessions(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make_narrow_table(columns, rows, NARROWING, console.width))
    else:
        print_table(columns, rows, right=NUMBERS)


def flatten_session(figures: Any) -> dict[str, Any]:
    """Returns the figures of a session as one dict."""
    facts = to_facts(figures)
    return {**facts.pop("session"), **facts}


def make_session_cells(facts: dict[str, Any], show_count: Callable[[int], str] = str) -> tuple[str, ...]:
    """Returns the row of a table with ``COLUMNS``; numbers that name something are always shown whole."""
    counts = (show_count(facts[name]) for name in ("num_requests", "num_errors"))
    return (
        *(str(facts[name]) for name in ("session", "host", "pid", "transport", "worker")),
        format_duration(facts["uptime_s"]),
        *counts,
        format_nbytes(facts["bytes_in"]),
        format_nbytes(facts["bytes_out"]),
        show_count(facts["num_under_way"]),
        ", ".join(facts["degraded"]),
    )
