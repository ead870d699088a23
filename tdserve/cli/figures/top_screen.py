"""The screen of ``tdserve top``: two moments in, tables out. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tdserve.cli.figures.server_figures import ServerFigures
from tdserve.cli.figures.sessions import (
    COLUMNS as SESSION_COLUMNS,
    NARROWING as SESSION_NARROWING,
    flatten_session,
    make_session_cells,
)
from tdserve.cli.screen.hidden_figures import are_hidden
from tdserve.cli.screen.narrow_table import Narrowing, make_narrow_table
from tdserve.cli.screen.render import format_count, format_duration, format_nbytes, to_one_line
from tdserve.messages.store_figures import find_num_rows, find_version
from tdserve.messages.store_kinds import name_kind

SERVER_COLUMNS = ("server", "address", "version", "open", "stores", "sessions", "held", "free", "in/s", "out/s")
SERVER_NARROWING = Narrowing(
    {"address": 24}, ("version",), ("version", "held", "open", "free", "sessions", "stores", "out/s")
)
PROCESS_COLUMNS = ("server", "process", "pid", "cpu", "memory", "descriptors")
PROCESS_NARROWING = Narrowing({}, ("process",), ("descriptors", "cpu", "memory"))
STORE_COLUMNS = ("server", "store", "kind", "rows", "size", "inserts/s", "samples/s", "version", "waiting", "readers")
STORE_NARROWING = Narrowing(
    {"store": 16}, ("kind",), ("readers", "waiting", "version", "kind", "samples/s", "inserts/s", "size", "server")
)


class Moment(NamedTuple):
    """All servers at one moment, by ``time.monotonic``."""

    taken_s: float
    found: list[ServerFigures]


class _Server(NamedTuple):
    """A server now, and before, if it answered then and has not been restarted since."""

    server: int
    now: Any
    before: Any
    elapsed_s: float

    def format_rate(self, count: Callable[[Any], int], what: str = "") -> str:
        """Shows how fast a count grows; nothing on the first look."""
        if self.before is None:
            return ""
        grown = (count(self.now) - count(self.before)) / self.elapsed_s
        return format_nbytes(int(grown)) if what == "bytes" else format_count(int(max(grown, 0.0)))


def compose_screen(before: Moment | None, now: Moment, num_rows: int, width: int) -> RenderableType:
    """Returns the tables of all servers, within ``width`` characters; rates are those between the two moments."""
    servers = [_pair(each, before, now.taken_s) for each in now.found if each.figures is not None]
    first = 0 if len(now.found) > 1 else 1  # of one server its number is left out

    def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], narrowing: Narrowing) -> Table:
        return make_narrow_table(columns[first:], [row[first:] for row in rows], narrowing, width)

    stores = [row for each in servers for row in _list_stores(each)][:num_rows]
    sessions = [
        (str(each.server), *make_session_cells(flatten_session(session), format_count))
        for each in servers
        for session in each.now.sessions
    ][:num_rows]
    parts: list[RenderableType] = [
        make_table(
            SERVER_COLUMNS, [_make_server_cells(each, _find(now, each.server)) for each in servers], SERVER_NARROWING
        ),
        *(
            Text(to_one_line(f"server {each.server} does not answer: {each.fault}"))
            for each in now.found
            if each.figures is None
        ),
        make_table(PROCESS_COLUMNS, [row for each in servers for row in _list_processes(each)], PROCESS_NARROWING),
        make_table(STORE_COLUMNS, stores, STORE_NARROWING),
        make_table(("server", *SESSION_COLUMNS), sessions, SESSION_NARROWING),
    ]
    return Group(*(each for part in parts for each in (part, "")))


def _find(moment: Moment, server: int) -> ServerFigures:
    return next(each for each in moment.found if each.server == server)


def _pair(found: ServerFigures, before: Moment | None, taken_s: float) -> _Server:
    earlier = None if before is None else next((e for e in before.found if e.server == found.server), None)
    is_same = earlier is not None and earlier.figures is not None and earlier.figures.uptime_s <= found.figures.uptime_s
    elapsed_s = 0.0 if before is None else taken_s - before.taken_s
    return _Server(
        found.server, found.figures, earlier.figures if earlier is not None and is_same else None, max(elapsed_s, 1e-6)
    )


def _make_server_cells(server: _Server, found: ServerFigures) -> tuple[str, ...]:
    now = server.now
    if are_hidden(now.workers):
        of_whole_server = ("-", "-", "", "")
    else:
        of_whole_server = (
            format_nbytes(now.held_bytes),
            format_nbytes(now.root_free_bytes),
            server.format_rate(lambda figures: sum(each.bytes_in for each in figures.transports), "bytes"),
            server.format_rate(lambda figures: sum(each.bytes_out for each in figures.transports), "bytes"),
        )
    return (
        str(server.server),
        found.address,
        now.version,
        format_duration(now.uptime_s),
        format_count(sum(kind.num_stores for kind in now.kinds)),
        format_count(now.num_sessions),
        *of_whole_server,
    )


def _list_processes(server: _Server) -> list[tuple[str, ...]]:
    before = {} if server.before is None else {(each.process, each.pid): each.cpu_s for each in server.before.processes}
    rows: list[tuple[str, ...]] = []
    for each in server.now.processes:
        cpu_s = before.get((each.process, each.pid))
        share = "" if cpu_s is None else f"{100 * (each.cpu_s - cpu_s) / server.elapsed_s:.0f} %"
        facts = (
            each.process,
            str(each.pid),
            share,
            format_nbytes(each.resident_bytes),
            format_count(each.num_descriptors),
        )
        rows.append((str(server.server), *facts))
    return rows


def _list_stores(server: _Server) -> list[tuple[str, ...]]:
    before = {} if server.before is None else {each.description.uid: each for each in server.before.stores}
    rows = []
    for each in server.now.stores:
        described, num_rows, version = each.description, find_num_rows(each), find_version(each)
        rates = ["", ""]
        earlier = before.get(described.uid)
        if earlier is not None and earlier.is_open and described.capacity:
            grown = (
                described.inserts - earlier.description.inserts,
                described.samples - earlier.description.samples,
            )
            rates = [format_count(round(max(count, 0) / server.elapsed_s)) for count in grown]
        rows.append(
            (
                str(server.server),
                described.name,
                name_kind(described.kind, is_queue=each.is_queue),
                "" if num_rows is None else format_count(num_rows),
                format_nbytes(described.nbytes),
                *rates,
                "" if described.capacity or version is None else str(version),
                format_count(sum(wait.num_waiting for wait in each.waits)),
                format_count(each.num_readers) if each.num_readers else "",
            )
        )
    return rows
