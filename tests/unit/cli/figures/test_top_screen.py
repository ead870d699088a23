"""tdserve/cli/figures/top_screen.py: whatever the width and the names, each figure that is shown is whole."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from tdserve.cli.figures.server_figures import ServerFigures
from tdserve.cli.figures.top_screen import Moment, compose_screen
from tdserve.v1 import control_pb2

NUM_STORES = 25
BIG = 9_876_543_210_123
LONG = "n" * 200


def make_figures(uptime_s: float, num_inserts: int) -> control_pb2.ObserveResponse:
    """Returns large figures of tables and weights; every other name is long."""
    figures = control_pb2.ObserveResponse(uptime_s=uptime_s, version="0.1.0.dev0", held_bytes=BIG, root_free_bytes=BIG)
    figures.num_sessions = 12_345
    figures.workers.add(is_ready=True)
    figures.kinds.add(kind=control_pb2.STORE_KIND_REPLAY, num_stores=123_456)
    figures.transports.add(transport="gloo", bytes_in=num_inserts << 10, bytes_out=num_inserts << 10)
    figures.processes.add(
        process="fork-server", pid=4_194_303, resident_bytes=BIG, cpu_s=uptime_s * 31, num_descriptors=123_456
    )
    for number in range(NUM_STORES):
        name = f"store-{number}" if number % 2 else f"{LONG}-{number}"
        described = figures.stores.add(is_open=True, num_readers=12_345).description
        described.uid, described.name, described.num_rows, described.nbytes = f"uid-{number}", name, BIG, BIG
        described.kind = control_pb2.STORE_KIND_REPLAY if number % 3 else control_pb2.STORE_KIND_WEIGHTS
        if number % 3:
            described.capacity, described.inserts, described.samples = BIG, num_inserts, 2 * num_inserts
        else:
            described.version = 1_234_567
        figures.stores[-1].waits.add(call="sample", num_waiting=12_345)
        session = figures.sessions.add(uptime_s=uptime_s, num_requests=BIG, num_errors=BIG, bytes_in=BIG, bytes_out=BIG)
        session.session.session, session.session.pid, session.session.transport = 169_762_191_234, 4_194_303, "gloo"
        session.session.host = "a-machine.of-a-cluster.example.com" if number % 2 else "here"
        session.degraded.extend([name] if number % 5 == 0 else [])
    return figures


def show(width: int, num_servers: int) -> list[str]:
    """Returns the lines of a second look on a terminal of this width."""
    before, now = (
        Moment(taken_s, [ServerFigures(at, f"127.0.0.1:{60_001 + at}", figures) for at in range(num_servers)])
        for taken_s, figures in ((10.0, make_figures(100.0, 7)), (12.0, make_figures(102.0, BIG)))
    )
    return render(before, now, width)


def render(before: Moment | None, now: Moment, width: int) -> list[str]:
    """Returns the lines of a look after another."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(compose_screen(before, now, NUM_STORES, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_screen_when_names_and_figures_are_long_then_only_names_are_cut(width: int, num_servers: int) -> None:
    lines = show(width, num_servers)
    assert max(map(cell_len, lines)) <= width
    for line in lines:
        for word in line.split():
            assert "…" not in word or "nnn" in word or word.startswith("a-mach"), line
    header = next(line for line in lines if " rows " in line)
    assert {"store", "rows", "size"} <= {*header.split()}
    (row,) = [line.split() for line in lines if " store-1 " in f" {line} "][:1]
    assert row[header.split().index("rows")] == "9.88T"
    assert " 8.98 TiB " in f"{' '.join(row)} "
    words = {word for line in lines for word in line.split()}
    assert {"127.0.0.1:60001", "4194303", "169762191234"} <= words


def test_screen_when_wide_then_all_columns_are_there_and_rates() -> None:
    lines = show(400, 1)
    header = next(line.split() for line in lines if line.startswith("store "))
    assert header == ["store", "kind", "rows", "size", "inserts/s", "samples/s", "version", "waiting", "readers"]
    row = next(line.split() for line in lines if line.startswith("store-1 "))
    assert row == ["store-1", "replay", "9.88T", "8.98", "TiB", "4.94T", "9.88T", "12.3k", "12.3k"]
    assert any(line.startswith(f"{LONG}-0 ") for line in lines)


def test_screen_when_narrow_then_names_that_differ_at_the_end_still_do() -> None:
    names = [line.split()[0] for line in show(80, 1) if line.startswith("nnn")]
    assert len({*names}) == len(names) == NUM_STORES // 2 + 1


def test_screen_when_a_store_was_not_opened_then_neither_rows_nor_rates_of_it() -> None:
    before, now = make_figures(100.0, 0), make_figures(102.0, BIG)
    for figures in (before, now):
        figures.stores[1].is_open = figures is now
    before.stores[1].description.num_rows = 0
    first, second = (Moment(at_s, [ServerFigures(0, "a", each)]) for at_s, each in ((10.0, before), (12.0, now)))
    assert find_row(render(None, first, 400), "store-1") == ["store-1", "replay", "8.98", "TiB", "12.3k", "12.3k"]
    opened = ["store-1", "replay", "9.88T", "8.98", "TiB", "12.3k", "12.3k"]
    assert find_row(render(first, second, 400), "store-1") == opened


def find_row(lines: list[str], store: str) -> list[str]:
    """Returns the words of a store's line."""
    return next(line.split() for line in lines if line.startswith(f"{store} "))


def test_screen_when_the_token_hides_figures_of_the_server_then_no_zeros() -> None:
    figures = control_pb2.ObserveResponse(uptime_s=100.0, version="1")
    (header, shown, *_) = render(None, Moment(1.0, [ServerFigures(0, "a:1", figures)]), 200)
    assert header.split()[-4:] == ["held", "free", "in/s", "out/s"]
    assert shown.split()[-2:] == ["-", "-"]
