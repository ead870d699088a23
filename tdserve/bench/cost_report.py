"""Shows the model of what calls cost, apart from what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tdserve.bench.cost_model import (
    CORES_OF_MACHINE,
    MACHINES,
    PARTS,
    WIRE_BYTES_PER_S,
    WORKERS_OF_MACHINE,
    CallModel,
    fit,
    read_points,
)
from tdserve.bench.figures import Figure

NOTE = (
    f"calculated: machines of {CORES_OF_MACHINE} cores with one server of {WORKERS_OF_MACHINE} workers each, a wire of"
    f" {WIRE_BYTES_PER_S * 8 / 1e9:g} Gbit/s, and as many machines for clients; every part works on one call at a time,"
    " switches are no limit, and costs grow with shards as in the line that was fitted.\n"
    "Memory of a session is the slope over clients, and that of a server over shards; client: of a client's process."
)


def show_costs(console: Console, figures: Iterable[Figure]) -> None:
    """Prints the model of each kind of call that was measured with several numbers of clients; nothing without such."""
    models = [
        fit(call, points, len(os.sched_getaffinity(0)))
        for call, points in read_points(figures).items()
        if len({point.num_clients for point in points}) > 1
    ]
    if not models:
        return
    costs = Table(title="fitted to what was measured", title_justify="left", show_edge=False)
    for heading in ("call", "part", "us a call", "us a shard", "MiB a session", "MiB a server"):
        costs.add_column(heading, justify="left" if heading in ("call", "part") else "right")
    for model in models:
        for part in PARTS:
            costs.add_row(
                model.call if part == PARTS[0] else "",
                part,
                f"{model.fixed_s[part] * 1e6:,.0f}",
                f"{model.per_shard_s[part] * 1e6:,.0f}",
                f"{model.session_mib[part]:.2f}",
                f"{model.shard_mib[part]:.1f}",
            )
    console.print(costs)
    errors = Table(title="calculated calls/s, less those measured", title_justify="left", show_edge=False)
    for heading in ("call", "clients, shards: error of the fit"):
        errors.add_column(heading)
    for model in models:
        shown = (f"{clients}, {shards}: {error:+.0%}" for (clients, shards), error in model.errors.items())
        errors.add_row(model.call, "   ".join(shown))
    console.print(errors)
    console.print(_make_limits(models))
    console.print(NOTE, style="dim")


def _make_limits(models: Iterable[CallModel]) -> Table:
    limits = Table(title="calculated: the next limit", title_justify="left", show_edge=False)
    for heading in ("call", "machines", "tables of", "calls/s", "limit", "then"):
        limits.add_column(heading, justify="right" if heading in ("machines", "calls/s") else "left")
    for model in models:
        if not model.is_usable:
            limits.add_row(model.call, "", "", "", "none: the fit is too far off", "")
            continue
        for num_machines in MACHINES:
            for num_shards in sorted({1, num_machines}):
                found = model.find_limits(num_machines, num_shards=num_shards)
                (first, rate), *others = found.items() or [("nothing that was measured", math.inf)]
                then = f"{others[0][0]} at {others[0][1]:,.0f}" if others else ""
                of = "one machine each" if num_shards == 1 else "all machines"
                limits.add_row(model.call, f"{num_machines:,}", of, f"{rate:,.0f}", first, then)
    return limits
