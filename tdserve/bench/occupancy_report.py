"""Shows how many sessions and stores servers have room for, apart from what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rich.console import Console

from tdserve.bench.cost_model import MACHINES
from tdserve.bench.figures import Figure
from tdserve.bench.fitted_table import TableColumn, print_fitted
from tdserve.bench.occupancy_model import (
    DESCRIPTORS_OF_PROCESS,
    MEMORY_OF_MACHINE,
    SERVER_PARTS,
    OneMore,
    read_occupancy,
)

NOTE = (
    f"calculated: servers with {MEMORY_OF_MACHINE >> 30} GiB of memory and {DESCRIPTORS_OF_PROCESS:,} descriptors of a"
    " process, one on each machine; each store on one server, of a shared one each part. Content, pages of files and"
    " inodes come on top."
)

COST_COLUMNS = (
    TableColumn("one more", 10),
    *(TableColumn(f"{part}: us, KiB, fds", 16) for part in SERVER_PARTS),
    TableColumn("catalog B"),
    TableColumn("idle us/s"),
)
LIMIT_COLUMNS = (
    TableColumn("of", 10),
    TableColumn("machines"),
    TableColumn("have room for", 12),
    TableColumn("limit", 8),
    TableColumn("then", 12),
    TableColumn("made/s by control", 8),
)


def show_occupancy(console: Console, figures: Iterable[Figure]) -> None:
    """Prints what each kind costs and how many there can be; nothing if none was measured."""
    found = read_occupancy(figures)
    if not found:
        return
    print_fitted(console, COST_COLUMNS, map(_list_costs, found), title="measured: what one more costs a server")
    print_fitted(console, LIMIT_COLUMNS, _list_limits(found), title="calculated: how many there can be")
    console.print(NOTE, style="dim")


def _list_costs(each: OneMore) -> tuple[str, ...]:
    parts = (
        f"{1e6 * each.cpu_s[part]:,.0f}, {each.nbytes[part] / 1024:,.1f}, {each.descriptors[part]:.1f}"
        for part in SERVER_PARTS
    )
    return each.kind, *parts, f"{each.catalog_nbytes:,.0f}", f"{1e6 * each.idle_s:,.1f}"


def _list_limits(found: Iterable[OneMore]) -> Iterator[tuple[str, ...]]:
    for each in found:
        (first, most), *others = each.find_limits().items() or [("nothing that was measured", math.inf)]
        rate = 1 / each.cpu_s["control"] if each.cpu_s["control"] > 0 else math.inf
        for num_machines in MACHINES:
            then = f"{others[0][0]} at {num_machines * others[0][1]:,.0f}" if others else ""
            yield (
                f"{each.kind}s",
                f"{num_machines:,}",
                f"{num_machines * most:,.0f}",
                first,
                then,
                f"{num_machines * rate:,.0f}",
            )
