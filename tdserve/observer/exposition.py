"""The server's figures as metrics of Prometheus: where each comes from. What it means stands in ``metric_table``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tdserve.base.call_times import BOUNDS_S
from tdserve.base.config import TRANSPORTS
from tdserve.messages.call_names import COUNTED_CALLS, READ
from tdserve.messages.store_figures import find_num_rows
from tdserve.messages.store_kinds import name_counted_kind, name_kind
from tdserve.observer.metric_table import METRICS
from tdserve.observer.snapshots import ServerSnapshot
from tdserve.v1 import control_pb2

MAX_READERS = 500
"""Most series of readers, over all weights stores."""

MAX_DEGRADED = 100

MAX_LABEL_CHARACTERS = 128
"""Length of a label; names of stores have up to 200 bytes, and few more than 60 characters."""

OTHER = "__other__"
"""Label of what is summed up, so that the number of series stays bounded."""

Labels = tuple[str, ...]
PlainFamily = GaugeMetricFamily | CounterMetricFamily


class FigureCollector:
    """Gives one snapshot to a registry of ``prometheus_client``."""

    def __init__(self, snapshot: ServerSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Yields all metrics that the snapshot has values of."""
        families: dict[str, PlainFamily] = {}
        for name, labels, value in list_values(self._snapshot):
            family = families.get(name) or families.setdefault(name, _make_family(name))
            family.add_metric(labels, value)
        yield from families.values()
        if self._snapshot.figures is not None:
            yield _make_histogram(self._snapshot.figures.calls)


FAULT_CODES = ("DATA_LOSS", "INTERNAL", "UNKNOWN")
"""Codes of a fault of the server, which raise an alert."""


def list_values(snapshot: ServerSnapshot) -> Iterator[tuple[str, Labels, float]]:
    """Yields name, labels and value of every series but those of histograms."""
    figures = snapshot.figures
    yield "tdserve_up", (), float(figures is not None)
    yield "tdserve_observe_seconds", (), snapshot.duration_s
    if figures is None:
        return
    yield "tdserve_build_info", (figures.version, figures.server_id), 1
    yield "tdserve_start_time_seconds", (), figures.start_time_s
    yield from _list_requests(figures)
    yield from _list_processes(figures)
    yield from _list_stores(figures)
    yield from _list_degraded(figures)


def _list_requests(figures: control_pb2.ObserveResponse) -> Iterator[tuple[str, Labels, float]]:
    first = dict.fromkeys(("OK", *FAULT_CODES), 0)  # from 0 on, so that the first fault is an increase
    counts = {("control", call): first for call in sorted(COUNTED_CALLS)} | {("client", READ): first}
    for each in figures.calls:
        errors = {error.code: error.num_calls for error in each.errors}
        counts[each.side, each.call] = {**first, "OK": max(sum(each.buckets) - sum(errors.values()), 0), **errors}
    for (side, call), codes in counts.items():
        for code, num_calls in codes.items():
            yield "tdserve_requests_total", (side, call, code), num_calls
    yield "tdserve_request_memory_bytes", (), figures.held_bytes
    yield "tdserve_request_memory_limit_bytes", (), figures.held_limit_bytes
    for moved in figures.transports:
        for direction in ("in", "out", "relayed"):
            where = moved.transport, direction
            yield "tdserve_transport_bytes_total", where, getattr(moved, f"bytes_{direction}")
            yield "tdserve_transport_transfers_total", where, getattr(moved, f"transfers_{direction}")
    for transport in sorted({*TRANSPORTS[1:], *figures.sessions_by_transport}):  # from 0 on: the last one's end is seen
        yield "tdserve_sessions", (transport,), figures.sessions_by_transport.get(transport, 0)


def _list_processes(figures: control_pb2.ObserveResponse) -> Iterator[tuple[str, Labels, float]]:
    for worker in figures.workers:
        yield "tdserve_worker_up", (str(worker.worker),), worker.is_ready
        yield "tdserve_worker_restarts_total", (str(worker.worker),), worker.num_restarts
    yield "tdserve_observer_restarts_total", (), figures.num_observer_restarts
    for each in figures.processes:
        yield "tdserve_process_resident_memory_bytes", (each.process,), each.resident_bytes
        yield "tdserve_process_anonymous_memory_bytes", (each.process,), each.anonymous_bytes
        yield "tdserve_process_cpu_seconds_total", (each.process,), each.cpu_s
        yield "tdserve_process_open_fds", (each.process,), each.num_descriptors
        yield "tdserve_process_max_fds", (each.process,), each.max_descriptors
    yield "tdserve_disk_free_bytes", (), figures.root_free_bytes
    yield "tdserve_disk_size_bytes", (), figures.root_size_bytes
    yield "tdserve_unsynced_stores", (), figures.num_unsynced_stores
    if figures.HasField("sync_age_s"):
        yield "tdserve_sync_age_seconds", (), figures.sync_age_s
    if figures.checkpoint_interval_s:
        yield "tdserve_checkpoint_interval_seconds", (), figures.checkpoint_interval_s
    if figures.checkpoint or figures.checkpoint_interval_s:
        yield "tdserve_checkpoint_age_seconds", (), figures.checkpoint_age_s if figures.checkpoint else figures.uptime_s


def _list_stores(figures: control_pb2.ObserveResponse) -> Iterator[tuple[str, Labels, float]]:
    for count in figures.kinds:
        yield "tdserve_stores", (name_counted_kind(count),), count.num_stores
    yield "tdserve_other_stores", (), figures.num_other_stores
    num_readers = 0
    for store in figures.stores:
        label = make_label(store.description.name)
        kind_name = name_kind(store.description.kind, is_queue=store.is_queue)
        yield from _list_store(store, label, kind_name)
        if kind_name == "weights":
            yield from _list_weights(store, label)
            for reader in store.readers[: MAX_READERS - num_readers]:
                num_readers += 1
                who = label, make_label(f"{reader.host[:64]}:{reader.pid}:{reader.session}")
                yield "tdserve_reader_lag_versions", who, reader.lag
                yield "tdserve_reader_age_seconds", who, reader.age_s
    if figures.HasField("other_stores"):
        yield from _list_store(figures.other_stores, OTHER, OTHER)


def _list_store(store: control_pb2.StoreFigures, label: str, kind: str) -> Iterator[tuple[str, Labels, float]]:
    described = store.description
    yield "tdserve_store_bytes", (label, kind), described.nbytes
    if (num_rows := find_num_rows(store)) is not None:
        yield "tdserve_store_rows", (label, kind), num_rows
    if described.capacity:
        yield "tdserve_store_capacity_rows", (label,), described.capacity
    if described.capacity and store.is_open:
        yield "tdserve_store_inserts_total", (label,), described.inserts
        yield "tdserve_store_samples_total", (label,), described.samples
        if described.inserts:
            yield "tdserve_store_samples_per_insert", (label,), described.samples / described.inserts
        yield "tdserve_store_leased_rows", (label,), described.num_leased
        yield "tdserve_store_reserved_rows", (label,), described.reserved_rows
    if store.HasField("sample_age"):
        yield "tdserve_store_sample_age_seconds", (label,), store.sample_age.mean_s
        yield "tdserve_store_sample_age_rows", (label,), store.sample_age.mean_rows
        if store.sample_age.HasField("mean_lag"):
            yield "tdserve_store_sample_lag_versions", (label,), store.sample_age.mean_lag
    if store.priority_sum:
        yield "tdserve_store_priority_mass", (label,), store.priority_sum
    if store.is_queue:
        yield "tdserve_store_queue_depth_rows", (label,), max(described.num_rows - described.num_leased, 0)
    for wait in store.waits:
        yield "tdserve_store_waits_total", (label, wait.call), wait.num_waits
        yield "tdserve_store_wait_seconds_total", (label, wait.call), wait.sum_s
        yield "tdserve_store_waiting_calls", (label, wait.call), wait.num_waiting
        yield "tdserve_store_longest_wait_seconds", (label, wait.call), wait.longest_s


def _list_weights(store: control_pb2.StoreFigures, label: str) -> Iterator[tuple[str, Labels, float]]:
    if store.is_open:  # else its versions are not known
        yield "tdserve_store_newest_version", (label,), store.description.version
        yield "tdserve_store_newest_version_age_seconds", (label,), store.newest_age_s
        yield "tdserve_store_kept_versions", (label,), store.num_versions
        yield "tdserve_store_readers", (label,), store.num_readers


def _list_degraded(figures: control_pb2.ObserveResponse) -> Iterator[tuple[str, Labels, float]]:
    counts: dict[str, int] = {}
    for session in figures.sessions:
        for name in session.degraded:
            label = make_label(name) if len(counts) < MAX_DEGRADED or make_label(name) in counts else OTHER
            counts[label] = counts.get(label, 0) + 1
    for label, num_sessions in counts.items():
        yield "tdserve_store_degraded_sessions", (label,), num_sessions


def _make_family(name: str) -> PlainFamily:
    metric = _BY_NAME[name]
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(metric.name, metric.text, labels=metric.labels)


def _make_histogram(calls: Iterable[control_pb2.CallFigures]) -> Family:
    metric = _BY_NAME["tdserve_request_duration_seconds"]
    family = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for each in calls:
        num_calls, buckets = 0, []
        for bound, num_more in zip(bounds, each.buckets, strict=True):
            num_calls += num_more
            buckets.append((bound, num_calls))
        family.add_metric((each.side, each.call), buckets, each.sum_s)
    return family


_BY_NAME = {metric.name: metric for metric in METRICS}


def make_label(text: str) -> str:
    """Returns the label of a text of a stranger: short, printable, and different for different texts.

    It is the text if that is such and not ``OTHER``; else what can be shown of it, with a part of its hash.
    """
    if text.isprintable() and len(text) <= MAX_LABEL_CHARACTERS and text != OTHER:
        return text
    shown = "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: MAX_LABEL_CHARACTERS - 10]
    )
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{shown}\N{HORIZONTAL ELLIPSIS}#{digest}"
