"""What pages show of the server's figures. No I/O."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tdserve.base.call_times import BOUNDS_S
from tdserve.cli.screen.leaf_table import make_cells
from tdserve.cli.screen.render import escape_unprintable
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.catalog.structure_leaves import describe_leaves
from tdserve.messages.store_figures import find_num_rows
from tdserve.messages.store_kinds import name_kind
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MIN_RATE_S = 0.5
"""Least time between two counts whose difference makes a rate."""

MAX_REPORT_AGE_S = 12.0
"""A client that has reported for no longer than this, two of its reports' pauses, has moved nothing since."""

MAX_COUNTED = 40_000
"""Stores and sessions whose counts are remembered."""


class ShownRates:
    """Counts as they were shown before, from which the rates since then follow."""

    def __init__(self) -> None:
        self._counted: OrderedDict[object, tuple[float, Sequence[float], Sequence[float] | None]] = OrderedDict()

    def compute(self, key: object, counts: Sequence[float], now_s: float) -> Sequence[float] | None:
        """Returns the changes of some counts per second since they were given before; None if they were not."""
        before_s, before, rates = self._counted.pop(key, (now_s, counts, None))
        if now_s < before_s:  # of an earlier run of the server
            before_s, before, rates = now_s, counts, None
        if now_s - before_s >= MIN_RATE_S:
            pairs = zip(counts, before, strict=True)
            rates = [max(count - earlier, 0.0) / (now_s - before_s) for count, earlier in pairs]
            before_s, before = now_s, counts
        self._counted[key] = before_s, before, rates
        while len(self._counted) > MAX_COUNTED:
            self._counted.popitem(last=False)
        return rates


def describe_store(store: control_pb2.StoreFigures, rates: ShownRates, now_s: float) -> dict[str, Any]:
    """Returns what a line of the list of stores shows."""
    described = store.description
    counts = (described.inserts, described.samples, described.version)
    rate = rates.compute(described.uid or described.name, counts, now_s) if store.is_open else None
    return {
        "name": described.name,
        "kind": name_kind(described.kind, is_queue=store.is_queue),
        "rows": find_num_rows(store),
        "capacity": described.capacity,
        "nbytes": described.nbytes,
        "rate": rate,
        "waiting": sum(wait.num_waiting for wait in store.waits),
        "is_table": bool(described.capacity),
    }


def explain_store(described: StoreDescription) -> dict[str, Any]:
    """Returns what a store's own page shows beside its figures."""
    settings: Any = json.loads(described.settings) if described.settings else {}
    rules = {name: rule for name, rule in settings.items() if isinstance(rule, dict)}
    others = {name: value for name, value in settings.items() if name not in rules}
    return {
        "leaves": list_tree(described.spec),
        "rules": {name: _describe_rule(rule) for name, rule in rules.items()},
        "settings": {name: escape_unprintable(str(value)) for name, value in others.items()},
        "samples_per_insert": described.samples / described.inserts if described.inserts else None,
        "lags": (described.lag_min, described.lag_mean, described.lag_max) if described.lag_max is not None else None,
        "policy": described.policy,
        "newest_policy_version": described.newest_policy_version,
        "versions": list(reversed(described.versions)),
        "created_s": described.created_s,
        "durability": described.durability,
        "num_leased": described.num_leased,
        "reserved_rows": described.reserved_rows,
        "num_incomplete": described.num_incomplete,
        "is_closed": described.is_closed,
        "read_only": described.read_only,
    }


def list_tree(spec: Spec) -> list[dict[str, Any]]:
    """Returns the lines of a structure's tree, each part above what is in it, otherwise in the order of the keys."""
    leaves = {(leaf.key,) if isinstance(leaf.key, str) else tuple(leaf.key): leaf for leaf in describe_leaves(spec)}
    order: dict[tuple[str, ...], int] = {}
    for path in leaves:
        for depth in range(1, len(path) + 1):
            order.setdefault(path[:depth], len(order))
    paths = sorted(leaves, key=lambda path: [order[path[:depth]] for depth in range(1, len(path) + 1)])
    return [
        {
            "depth": min(len(path) - 1, 8),
            "key": escape_unprintable(path[-1]),
            "cells": make_cells(leaves[path])[1:],
        }
        for path in paths
    ]


def _describe_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: escape_unprintable(str(value)) for name, value in rule.items() if name != "kind"}
    return {"kind": escape_unprintable(str(rule.get("kind", ""))), "fields": fields}


def describe_session(
    each: control_pb2.SessionFigures, rates: ShownRates, now_s: float, *, uptime_s: float
) -> dict[str, Any]:
    """Returns a line of the list of sessions. Clients report their content from time to time: its rate is that between
    two reports. ``uptime_s`` is the server's."""
    number = each.session.session
    content = None
    if each.reported_s:
        content = rates.compute(("content", number), (each.bytes_in, each.bytes_out), each.reported_s)
    is_over = uptime_s - each.reported_s > MAX_REPORT_AGE_S
    return {
        "figures": each,
        "rate": rates.compute(("session", number), (each.num_requests,), now_s),
        "content_rate": (0.0, 0.0) if content is not None and is_over else content,
    }


def describe_process(each: control_pb2.ProcessFigures, figures: control_pb2.ObserveResponse) -> dict[str, Any]:
    """Returns a line of the list of processes."""
    workers = {f"worker-{worker.worker}": worker for worker in figures.workers}
    worker = workers.get(each.process)
    return {
        "figures": each,
        "restarts": worker.num_restarts if worker is not None else None,
        "is_down": worker is not None and not worker.is_ready,
    }


def summarise_calls(calls: Iterable[control_pb2.CallFigures]) -> list[dict[str, Any]]:
    """Returns the number, errors, mean and percentiles of each kind of call, the most frequent first."""
    found = []
    for each in calls:
        num_calls = sum(each.buckets)
        if num_calls:
            found.append(
                {
                    "side": each.side,
                    "call": each.call,
                    "num_calls": num_calls,
                    "num_errors": sum(error.num_calls for error in each.errors),
                    "errors": ", ".join(f"{error.code} {error.num_calls}" for error in each.errors),
                    "mean_s": each.sum_s / num_calls,
                    "p50_s": find_bound(each.buckets, 0.5),
                    "p99_s": find_bound(each.buckets, 0.99),
                }
            )
    return sorted(found, key=lambda call: -call["num_calls"])


def find_bound(buckets: Sequence[int], share: float) -> float | None:
    """Returns the time within which a share of the calls was done; None if it is above the last bound."""
    num_calls = 0
    for bound, num in zip(BOUNDS_S, buckets, strict=False):
        num_calls += num
        if num_calls >= share * sum(buckets):
            return float(bound)
    return None


def count_live(figures: control_pb2.ObserveResponse) -> dict[str, float]:
    """Returns the counts that the charts show per second, and what they show as it is."""
    stores = [*figures.stores, figures.other_stores]
    return {
        "time_s": figures.time_s,
        "requests": sum(sum(each.buckets) for each in figures.calls if each.side == "control"),
        "rows_in": sum(each.description.inserts for each in stores),
        "rows_out": sum(each.description.samples for each in stores),
        "bytes_in": sum(each.bytes_in for each in figures.transports),
        "bytes_out": sum(each.bytes_out for each in figures.transports),
        "cpu_s": sum(each.cpu_s for each in figures.processes),
        "sessions": figures.num_sessions,
        "memory": sum(each.anonymous_bytes for each in figures.processes),
    }
