"""Shows the model of what calls cost, apart from what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator

from rich.console import Console

from tdserve.bench.cost_model import (
    CORES_OF_MACHINE,
    MACHINES,
    MAX_PER_CORE,
    PARTS,
    WIRE_BYTES_PER_S,
    WORKERS_OF_MACHINE,
    CallModel,
    fit,
    read_points,
)
from tdserve.bench.figures import Figure
from tdserve.bench.fitted_table import TableColumn, print_fitted

NOTE = (
    f"calculated: machines of {CORES_OF_MACHINE} cores with one server of {WORKERS_OF_MACHINE} workers each, a wire of"
    f" {WIRE_BYTES_PER_S * 8 / 1e9:g} Gbit/s, and as many machines for clients; every part works on one call at a time,"
    " switches are no limit, costs grow with shards as in the line that was fitted, and each client has"
    f" a core. More if crowded: for each client per core beyond one, up to {MAX_PER_CORE}; more are not fitted.\n"
    "Memory of a session is the slope over clients, and that of a server over shards; client: of a client's process."
)

COST_COLUMNS = (
    TableColumn("call: part", 14),
    *map(TableColumn, ("us a call", "us a shard", "more if crowded", "MiB a session", "MiB a server")),
)
ERROR_COLUMNS = (TableColumn("call", 10), TableColumn("clients, shards: error of the fit", 20))
LIMIT_COLUMNS = (
    TableColumn("call", 10),
    TableColumn("machines"),
    TableColumn("tables of", 11),
    TableColumn("calls/s"),
    TableColumn("limit", 8),
    TableColumn("then", 12),
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
    print_fitted(console, COST_COLUMNS, _list_costs(models), title="fitted to what was measured")
    print_fitted(console, ERROR_COLUMNS, map(_list_errors, models), title="calculated calls/s, less those measured")
    print_fitted(console, LIMIT_COLUMNS, _list_limits(models), title="calculated: the next limit")
    console.print(NOTE, style="dim")


def _list_costs(models: Iterable[CallModel]) -> Iterator[tuple[str, ...]]:
    for model in models:
        for part in PARTS:
            yield (
                f"{model.call}: {part}",
                f"{model.fixed_s[part] * 1e6:,.0f}",
                f"{model.per_shard_s[part] * 1e6:,.0f}",
                f"{model.crowding:.1%}",
                f"{model.session_mib[part]:.2f}",
                f"{model.shard_mib[part]:.1f}",
            )


def _list_errors(model: CallModel) -> tuple[str, str]:
    shown = (f"{clients}, {shards}: {error:+.0%}" for (clients, shards), error in model.errors.items())
    return model.call, "   ".join(shown)


def _list_limits(models: Iterable[CallModel]) -> Iterator[tuple[str, ...]]:
    for model in models:
        if not model.is_usable:
            yield model.call, "", "", "", "none: the fit is too far off", ""
            continue
        for num_machines in MACHINES:
            for num_shards in sorted({1, num_machines}):
                found = model.find_limits(num_machines, num_shards=num_shards)
                (first, rate), *others = found.items() or [("nothing that was measured", math.inf)]
                then = f"{others[0][0]} at {others[0][1]:,.0f}" if others else ""
                of = "one machine each" if num_shards == 1 else "all machines"
                yield model.call, f"{num_machines:,}", of, f"{rate:,.0f}", first, then
