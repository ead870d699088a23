"""What one more session or store costs, and how many of them servers have room for."""

from __future__ import annotations

import io
from contextlib import closing

import pytest
from rich.console import Console

from tdserve.bench.figures import Figure
from tdserve.bench.occupancy_model import DESCRIPTORS_OF_PROCESS, MEMORY_OF_MACHINE, read_occupancy
from tdserve.bench.occupancy_report import show_occupancy
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.occupancy import measure_occupancy
from tdserve.store.database.catalog_db import MAX_CATALOG_BYTES


def make_figure(kind: str, **changed: float) -> Figure:
    """A figure of things that cost control alone something."""
    details = {f"{part} {what}": 0.0 for part in ("control", "workers") for what in ("CPU", "KiB", "fds")}
    details |= {"catalog B": 0.0, "idle CPU": 0.0} | {name.replace("_", " "): value for name, value in changed.items()}
    return Figure("cluster", f"one more {kind}", "us", 5e3, 5.0, 9.0, 9, (5e3,), (), (), details)


def test_limits_when_calculated_then_the_least_comes_first() -> None:
    figures = [
        make_figure("session", control_KiB=4.0, workers_KiB=60.0, control_fds=1.0, workers_fds=2.0, control_CPU=500.0),
        make_figure("tensordict", catalog_B=512.0, control_KiB=0.5, idle_CPU=0.0),
        make_figure("table", control_KiB=-3.0),
    ]
    session, tensordict, table = read_occupancy(figures)
    assert session.cpu_s["control"] == pytest.approx(500e-6)
    assert session.find_limits() == pytest.approx(
        {
            "descriptors of workers": DESCRIPTORS_OF_PROCESS / 2,
            "descriptors of control": DESCRIPTORS_OF_PROCESS,
            "memory": MEMORY_OF_MACHINE / (64 * 1024),
        }
    )
    assert list(session.find_limits().values()) == sorted(session.find_limits().values())
    assert next(iter(tensordict.find_limits().items())) == ("catalog", MAX_CATALOG_BYTES / 512)
    assert table.find_limits() == {}


def test_report_when_shown_then_what_was_measured_and_calculated_are_apart() -> None:
    shown = io.StringIO()
    show_occupancy(Console(file=shown, width=200), [make_figure("table", control_KiB=64.0, control_CPU=2_000.0)])
    text = shown.getvalue()
    assert text.index("measured:") < text.index("calculated: how many")
    for part in (
        f"{MEMORY_OF_MACHINE // (64 * 1024):,}",
        f"{1_000 * MEMORY_OF_MACHINE // (64 * 1024):,}",
        "memory",
        "500",
    ):
        assert part in text
    shown = io.StringIO()
    show_occupancy(Console(file=shown), [])
    assert shown.getvalue() == ""


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.usefixtures("borrows_nothing")
def test_occupancy_when_measured_then_each_kind_costs_control_something(stage: Stage) -> None:
    with closing(measure_occupancy(stage)) as cases:
        figures = [stage.measure("cluster", case) for case in cases]
    found = {each.kind: each for each in read_occupancy(figures)}
    assert found.keys() == {"session", "tensordict", "table"}
    for each in found.values():
        assert each.cpu_s["control"] > 0
    assert found["session"].descriptors["control"] >= 1
