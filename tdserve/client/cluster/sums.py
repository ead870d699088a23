"""Figures of a cluster as the sums of those of its servers. Imports no torch: commands use it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tdserve.client.session.catalog.description import StoreDescription

_SUMS = (
    "num_rows", "capacity", "nbytes", "inserts", "samples", "reserved_rows", "num_leased", "num_incomplete",
    "num_pinned", "num_discarded", "num_waiting", "num_damaged",
)  # fmt: skip
"""Figures of a store that are the sums of those of its parts."""

MAX_DAMAGED_ROWS = 8
"""Damaged rows that are named by their numbers, of a part or of all."""


def add_up_parts(
    name: str,
    settings: str,
    parts: Mapping[int, StoreDescription],
    get_first_row: Callable[[int], int] | None = None,
    *,
    num_shards: int,
) -> StoreDescription:
    """Returns the structure of a shared store, and the sums of its parts' figures.

    Args:
        name: Name of the whole store.
        settings: Settings of the whole store.
        parts: Parts that answer, by their numbers; at least one.
        get_first_row: Returns the number that the first row of a part has in the store. None: rows are not named.
        num_shards: Number of all parts: the store is closed if all are known to be.
    """
    found = list(parts.values())
    damaged: list[int] = []
    if get_first_row is not None:
        damaged = [get_first_row(shard) + row for shard in sorted(parts) for row in parts[shard].damaged_rows]
    sums = {figure: sum(getattr(part, figure) for part in found) for figure in _SUMS}
    backlog = {consumer: sum(part.backlog.get(consumer, 0) for part in found) for consumer in found[0].backlog}
    is_closed = len(found) == num_shards and all(part.is_closed for part in found)
    whole = replace(found[0], name=name, settings=settings, is_closed=is_closed, backlog=backlog, **sums)
    return replace(whole, damaged_rows=tuple(damaged[:MAX_DAMAGED_ROWS]))


def add_up_stats(address: str, found: Mapping[int, dict[str, Any]], lost: Iterable[int]) -> dict[str, Any]:
    """Returns the figures of a cluster; see ``ClusterClient.stats``.

    Args:
        address: Address of the cluster.
        found: Figures of each server that answers, by its number.
        lost: Numbers of the others.
    """
    mine = {each.get("transport") for each in found.values()} - {None}
    return {
        "address": address,
        "servers": dict(found),
        "lost": sorted(lost),
        "transport": mine.pop() if len(mine) == 1 else None,
        "transports": _sum_counts(each["transports"] for each in found.values()),
        "sessions": [{"server": server, **each} for server in found for each in found[server]["sessions"]],
        "workers": [{"server": server, **each} for server in found for each in found[server]["workers"]],
    }


def _sum_counts(counts: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Adds up the counts of each transport."""
    found: dict[str, dict[str, int]] = {}
    for each in counts:
        for transport, figures in each.items():
            sums = found.setdefault(transport, {})
            for figure, value in figures.items():
                sums[figure] = sums.get(figure, 0) + value
    return found
