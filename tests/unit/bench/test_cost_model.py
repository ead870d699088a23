"""The model of costs: it finds the parts that make up the figures, and names the part that fails first."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tdserve.bench.cost_model import CORES_OF_MACHINE, WIRE_BYTES_PER_S, compute_rate, fit, read_points
from tdserve.bench.cost_report import show_costs
from tdserve.bench.figures import Figure

NUM_CORES = 2


def make_figure(
    call: str, num_clients: int, num_shards: int, *, control_us: float = 40.0, crowding: float = 0.0
) -> Figure:
    """A figure of a machine that the model describes without error: a shard costs the client another 500 us."""
    grown = 1 + crowding * max(num_clients / NUM_CORES - 1, 0)
    control_us, client_us, workers_us = grown * control_us, grown * (300.0 + 500.0 * num_shards), grown * 200.0
    rate = compute_rate(num_clients, (control_us + client_us + workers_us) / 1e6, NUM_CORES, 1e-3)
    alone_s = 1e-3 + (control_us + client_us + workers_us) / 1e6
    details = {"control CPU": control_us, "workers CPU": workers_us, "client CPU": client_us, "MB/s": rate / 10}
    details |= {"control MiB": 30.0 * num_shards + 0.5 * num_clients, "workers MiB": 0.0, "client MiB": 0.0}
    plural = "s"[: num_clients - 1]
    name = f"{call}, {num_clients} client{plural}, {num_shards} shard{'s'[: num_shards - 1]}"
    return Figure("cluster", name, "calls/s", rate, alone_s * 1e3, 9.0, 9, (rate,), (), (), details)


FIGURES = [make_figure("sample 256", clients, shards) for clients in (1, 2, 8) for shards in (1, 2, 4)]


def test_model_when_fitted_then_finds_the_costs_and_has_no_error() -> None:
    ((call, points),) = read_points(FIGURES).items()
    model = fit(call, points, NUM_CORES)
    assert (model.fixed_s["client"], model.per_shard_s["client"]) == pytest.approx((300e-6, 500e-6))
    assert (model.fixed_s["control"], model.per_shard_s["control"]) == pytest.approx((40e-6, 0.0), abs=1e-12)
    assert (model.session_mib["control"], model.shard_mib["control"]) == pytest.approx((0.5, 30.0))
    assert model.delay_s == pytest.approx(1e-3)
    assert model.nbytes == pytest.approx(1e5)
    assert len(model.errors) == len(FIGURES)
    assert max(map(abs, model.errors.values())) < 1e-6


def test_model_when_clients_share_cores_then_finds_how_much_more_that_costs() -> None:
    figures = [make_figure("sample 256", clients, 2, crowding=0.05) for clients in (1, 2, 4, 8)]
    figures.append(make_figure("sample 256", 64, 2, crowding=3.0))  # which is left out
    ((call, points),) = read_points(figures).items()
    model = fit(call, points, NUM_CORES)
    assert model.crowding == pytest.approx(0.05)
    assert model.compute_cpu_s("client", 2) == pytest.approx(1300e-6)
    assert max(map(abs, model.errors.values())) < 1e-6


def test_limits_when_tables_are_on_all_machines_then_the_cost_of_shards_comes_first() -> None:
    ((call, points),) = read_points(FIGURES).items()
    model = fit(call, points, NUM_CORES)
    apart = model.find_limits(1000, num_shards=1)
    assert next(iter(apart)) == "wire"
    assert apart["wire"] == pytest.approx(1000 * WIRE_BYTES_PER_S / 1e5)
    together = model.find_limits(1000, num_shards=1000)
    assert next(iter(together)) == "cores of clients"
    assert together["cores of clients"] == pytest.approx(1000 * CORES_OF_MACHINE / (300e-6 + 0.5))
    assert list(together.values()) == sorted(together.values())


@pytest.mark.parametrize("num_cores", [1, 4])
def test_rate_when_clients_are_few_or_many_then_that_of_one_call_or_of_the_cores(num_cores: int) -> None:
    assert compute_rate(1, 1e-3, num_cores, 2e-3) == pytest.approx(1 / 3e-3)
    assert compute_rate(1000, 1e-3, num_cores, 2e-3) == pytest.approx(num_cores / 1e-3, rel=0.01)
    rates = [compute_rate(clients, 1e-3, num_cores, 2e-3) for clients in range(1, 20)]
    assert rates == sorted(rates)


def test_report_when_shown_then_fit_errors_and_limits_are_apart_from_what_was_measured() -> None:
    console = Console(file=io.StringIO(), width=200)
    show_costs(console, [*FIGURES, *(make_figure("extend 64", clients, 1) for clients in (1, 2))])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("fitted to what was measured", "error of the fit", "calculated: the next limit", "extend 64", "1,000"):
        assert part in text


def test_report_when_nothing_was_measured_with_several_clients_then_empty() -> None:
    console = Console(file=io.StringIO())
    show_costs(console, [make_figure("sample 256", 1, 1)])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_model_when_costs_fall_with_shards_then_nothing_costs_less_than_nothing() -> None:
    """A busy machine: the first measurement took longer."""
    figures = [make_figure("sample 256", clients, 1, control_us=900.0) for clients in (1, 2)]
    figures += [make_figure("sample 256", clients, 2, control_us=20.0) for clients in (1, 2)]
    ((call, points),) = read_points(figures).items()
    model = fit(call, points, NUM_CORES)
    assert min(*model.fixed_s.values(), *model.per_shard_s.values()) >= 0
    assert model.find_limits(1000, num_shards=1000)


def test_report_when_the_model_is_far_off_then_names_no_limit() -> None:
    figures = [make_figure("sample 256", clients, shards) for clients in (1, 2) for shards in (1, 2)]
    figures[0] = replace(figures[0], median=figures[0].median * 40)
    shown = io.StringIO()
    show_costs(Console(file=shown, width=200), figures)
    assert "the fit is too far off" in shown.getvalue()
