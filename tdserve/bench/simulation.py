"""``tdserve bench simulate``: a thousand servers and ten thousand clients, which decide by the rules of real ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from tdserve.bench.call_costs import CallCosts
from tdserve.bench.fitted_table import TableColumn, print_fitted
from tdserve.bench.report import write_content
from tdserve.bench.simulated_cluster import Scenario, SimulatedCluster
from tdserve.rules.lost_servers import PROBE_INTERVAL_S, REACH_S

ASSUMPTIONS = f"""\
Real: placement by rendezvous hashing; the ring, sampler, priorities and limiter of every part of a table; what a \
client knows of masses, and how it divides a sample; the shard of a writer; when a lost server is noticed, and tried \
again.
Assumed: the CPU that a request costs at control and at a data worker, and the latency and bandwidth of the wire, all \
constant. A server's control, its workers together and its wire serve one request at a time each, in order.
Assumed: requests change a table in the moment they arrive. Clients have CPU enough, and pauses between their calls \
are exponential. The lost server is a process that ends, so that connections are refused; its rows come back.
Left out: claims and draws without control, coalescing, retries, sessions, disks, and switches between machines.
Rules: a call tries for {REACH_S:g} s to reach a server, which is tried again every {PROBE_INTERVAL_S:g} s."""

AGES_S = (0.0, 0.05, 0.5)
"""Ages up to which masses are used, in the comparison of them; a client uses the second."""

CROWD = Scenario(
    num_servers=8,
    num_clients=16,
    num_stores=1,
    part_rows=4096,
    learn_s=0.01,
    act_s=0.02,
    seconds=1.0,
    lost_at_s=9.0,
    changes_priorities=False,
)
"""Clients of one table that call so often that others have written since they asked for masses."""

AGE_FIGURES = (
    "requests for a sample",
    "shares of parts: mean distance %",
    "shares of parts: p99 distance %",
    "rows of a part: chi-square / freedom",
)
"""Of the comparison of ages."""

Figures = dict[str, float]


def simulate(scenario: Scenario, costs: CallCosts | None = None) -> Figures:
    """Runs a scenario; returns what was seen."""
    cluster = SimulatedCluster(scenario, costs)
    tally = cluster.run()
    num_parts = np.array([len(server.parts) for server in cluster.servers])
    busy = np.array([[s.control.busy_s, s.worker.busy_s, s.wire.busy_s] for s in cluster.servers]) / scenario.seconds
    keys = list(tally.expected)
    expected = np.array([tally.expected[key] for key in keys])
    drawn = np.array([tally.drawn.get(key, 0.0) for key in keys])
    freedom = max(len(keys) - len({store for store, _ in keys}), 1)
    busiest = busy.max(axis=1)
    return {
        **{f"{kind} calls/s": num / scenario.seconds for kind, num in tally.num_calls.items()},
        "requests for a sample": (tally.num_requests["mass"] + tally.num_requests["change"]) / tally.num_calls["sample"]
        + (tally.num_requests["rows"] - tally.num_calls["extend"]) / tally.num_calls["sample"],
        **{f"{kind} p50 ms": _percentile(waits_s, 50) * 1e3 for kind, waits_s in tally.waits_s.items()},
        **{f"{kind} p99 ms": _percentile(waits_s, 99) * 1e3 for kind, waits_s in tally.waits_s.items()},
        "parts of a server, mean": float(num_parts.mean()),
        "parts of a server, most": float(num_parts.max()),
        "parts of a server, fewest": float(num_parts.min()),
        "busy, mean of servers %": float(busiest.mean() * 100),
        "busy, hottest server %": float(busiest.max() * 100),
        "busy, its control %": float(busy[busiest.argmax(), 0] * 100),
        "busy, its workers %": float(busy[busiest.argmax(), 1] * 100),
        "busy, its wire %": float(busy[busiest.argmax(), 2] * 100),
        "rows of a part: chi-square / freedom": float(((drawn - expected) ** 2 / expected).sum() / freedom),
        "shares of parts: mean distance %": _mean(tally.distances) * 100,
        "shares of parts: p99 distance %": _percentile(tally.distances, 99) * 100,
        "loss: samples of its tables": tally.num_beside,
        "loss: of these waited for it": tally.num_slow,
        "loss: extends of other shards": tally.num_redirected,
        "loss: clients that noticed": len(tally.noticed_s),
        "loss: noticed after s, median": _percentile(tally.noticed_s, 50, scenario.lost_at_s),
        "loss: used again after s, median": _percentile(tally.found_s, 50, scenario.back_at_s),
    }


def compare_ages(seed: int) -> dict[float, Figures]:
    """Returns the figures of the crowd by the age up to which masses are used."""
    return {fresh_s: simulate(replace(CROWD, fresh_s=fresh_s, seed=seed)) for fresh_s in AGES_S}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _percentile(values: Sequence[float], share: float, since: float = 0.0) -> float:
    return float(np.percentile(values, share)) - since if values else 0.0


def make_scenario(num_servers: int, num_clients: int, num_stores: int | None, num_shards: int, seed: int) -> Scenario:
    """Returns a scenario of that size.

    Args:
        num_stores: None: one for ten clients.
        num_shards: Servers of a table, at most all of them.
    """
    stores = max(num_clients // 10, 1) if num_stores is None else num_stores
    return Scenario(num_servers, num_clients, stores, min(num_shards, num_servers), seed=seed)


def run_simulation(
    scenarios: Sequence[Scenario], *, json_path: Path | None = None, console: Console | None = None
) -> int:
    """Simulates one scenario after the other, and prints what was seen; returns the exit status.

    Raises:
        InvalidRequestError: The file cannot be written.
    """
    console = console or Console(highlight=False)
    started, costs, found = time.monotonic(), CallCosts(), []
    for scenario in scenarios:
        found.append(simulate(scenario, costs))
        title = f"simulated, not measured: {scenario.num_servers:,} servers, {scenario.num_clients:,} clients"
        _show(console, f"{title}, {scenario.num_stores:,} tables of {scenario.num_shards} shards", found[-1])
    ages = compare_ages(scenarios[0].seed)
    _show_ages(console, ages)
    _show(console, "assumed", {**asdict(costs), **asdict(scenarios[0])})
    notes = Grid.grid(padding=(0, 1))
    for line in ASSUMPTIONS.splitlines():
        notes.add_row("*", line)
    console.print(notes, style="dim")
    console.print(f"took {time.monotonic() - started:.0f} s", style="dim")
    if json_path is not None:
        runs = [{"scenario": asdict(each), "seen": seen} for each, seen in zip(scenarios, found, strict=True)]
        write_content(json_path, {"costs": asdict(costs), "simulated": runs, "ages": ages})
    return 0


def _show_ages(console: Console, ages: Mapping[float, Figures]) -> None:
    columns = [TableColumn("masses used up to s", 8), *map(TableColumn, AGE_FIGURES)]
    rows = [[f"{fresh_s:g}", *(f"{seen[name]:.3g}" for name in AGE_FIGURES)] for fresh_s, seen in ages.items()]
    title = f"one table, {CROWD.num_clients} fast clients: how old masses may be"
    print_fitted(console, columns, rows, title=title)
    console.print()


def _show(console: Console, title: str, figures: Mapping[str, float]) -> None:
    rows = [(name, f"{value:,.4g}") for name, value in figures.items()]
    print_fitted(console, (TableColumn("", 14), TableColumn("")), rows, title=title)
    console.print()
