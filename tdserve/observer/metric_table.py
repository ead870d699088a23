"""The metrics: name, kind, labels and meaning of each. What reads them from the server's figures is ``exposition``; the
guide's page prints this table (``python -m tdserve.observer.metric_guide``), and a test compares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: The name in Prometheus; that of a counter ends in ``_total``.
        kind: What may be done with its values.
        text: What it means.
        labels: Names of its labels.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("tdserve_up", "gauge", "1 if the control process answered the observer, else 0 and nothing else is known"),
    Metric("tdserve_observe_seconds", "gauge", "Time that the control process took for the observer's last question"),
    Metric("tdserve_build_info", "gauge", "1; the server's version and the id of its root", ("version", "server_id")),
    Metric("tdserve_start_time_seconds", "gauge", "When the control process started, since the epoch"),
    # ------------------------------------------------------------ requests
    Metric(
        "tdserve_requests_total",
        "counter",
        'Calls by side (control, worker, client), call and code ("OK" or that of the error)',
        ("side", "call", "code"),
    ),
    Metric(
        "tdserve_request_duration_seconds",
        "histogram",
        "Time of calls with their waits; of clients, until the content has arrived; of workers, that of their work",
        ("side", "call"),
    ),
    Metric("tdserve_request_memory_bytes", "gauge", "Content that the control process holds for requests"),
    Metric("tdserve_request_memory_limit_bytes", "gauge", "Its limit; requests beyond it are refused and tried again"),
    Metric(
        "tdserve_transport_bytes_total",
        "counter",
        "Content by transport and direction: in, out, or relayed from client to client",
        ("transport", "direction"),
    ),
    Metric(
        "tdserve_transport_transfers_total",
        "counter",
        "Transfers by transport and direction",
        ("transport", "direction"),
    ),
    Metric("tdserve_sessions", "gauge", "Open sessions by transport", ("transport",)),
    # ------------------------------------------------------------ processes
    Metric("tdserve_worker_up", "gauge", "1 if a data worker takes orders", ("worker",)),
    Metric("tdserve_worker_restarts_total", "counter", "Times that a data worker was replaced", ("worker",)),
    Metric("tdserve_observer_restarts_total", "counter", "Times that the observer was started again"),
    Metric(
        "tdserve_process_resident_memory_bytes",
        "gauge",
        "Memory of a process, with the pages of stores that it has mapped",
        ("process",),
    ),
    Metric("tdserve_process_anonymous_memory_bytes", "gauge", "Memory of a process without files", ("process",)),
    Metric("tdserve_process_cpu_seconds_total", "counter", "Processor time, user and system", ("process",)),
    Metric("tdserve_process_open_fds", "gauge", "Open file descriptors", ("process",)),
    Metric("tdserve_process_max_fds", "gauge", "Limit of file descriptors", ("process",)),
    Metric("tdserve_disk_free_bytes", "gauge", "Free space of the root's file system"),
    Metric("tdserve_disk_size_bytes", "gauge", "Size of the root's file system"),
    Metric("tdserve_unsynced_stores", "gauge", "Stores that the last pass over them could not bring to the disk"),
    Metric("tdserve_sync_age_seconds", "gauge", "Time since the last regular pass that has brought all of them there"),
    Metric(
        "tdserve_checkpoint_age_seconds",
        "gauge",
        "Time since the moment of the last checkpoint; without one, since the start of a server that writes them",
    ),
    Metric("tdserve_checkpoint_interval_seconds", "gauge", "Time between two of them, as --checkpoint-every sets it"),
    # ------------------------------------------------------------ stores
    Metric("tdserve_stores", "gauge", "Stores by kind; queues apart from other tables", ("kind",)),
    Metric("tdserve_other_stores", "gauge", 'Stores whose figures are summed under the label "__other__"'),
    Metric("tdserve_store_rows", "gauge", "Rows, entries or elements", ("store", "kind")),
    Metric("tdserve_store_bytes", "gauge", "Size of the tensors and values", ("store", "kind")),
    Metric("tdserve_store_capacity_rows", "gauge", "Most rows of a table", ("store",)),
    Metric("tdserve_store_inserts_total", "counter", "Rows ever inserted into a table", ("store",)),
    Metric("tdserve_store_samples_total", "counter", "Rows ever sampled from a table", ("store",)),
    Metric("tdserve_store_samples_per_insert", "gauge", "Rows sampled per row inserted", ("store",)),
    Metric(
        "tdserve_store_sample_age_seconds",
        "gauge",
        "Mean age of the rows of the newest sample: time since they were written",
        ("store",),
    ),
    Metric("tdserve_store_sample_age_rows", "gauge", "The same age in rows written since", ("store",)),
    Metric(
        "tdserve_store_sample_lag_versions",
        "gauge",
        "The same age in versions of the table's policy published since",
        ("store",),
    ),
    Metric("tdserve_store_priority_mass", "gauge", "Sum of priorities as the sampler weighs them", ("store",)),
    Metric("tdserve_store_leased_rows", "gauge", "Rows handed out and not acknowledged", ("store",)),
    Metric("tdserve_store_reserved_rows", "gauge", "Rows that writers are filling", ("store",)),
    Metric("tdserve_store_queue_depth_rows", "gauge", "Rows of a queue that were not taken yet", ("store",)),
    Metric(
        "tdserve_store_waits_total", "counter", "Calls that had to wait for rows, room or limiter", ("store", "call")
    ),
    Metric("tdserve_store_wait_seconds_total", "counter", "Time of waits that have ended", ("store", "call")),
    Metric("tdserve_store_waiting_calls", "gauge", "Calls that wait now", ("store", "call")),
    Metric("tdserve_store_longest_wait_seconds", "gauge", "Time for which the first of them waits", ("store", "call")),
    # ------------------------------------------------------------ weights
    Metric("tdserve_store_newest_version", "gauge", "Newest version of weights", ("store",)),
    Metric("tdserve_store_newest_version_age_seconds", "gauge", "Time since it was published", ("store",)),
    Metric("tdserve_store_kept_versions", "gauge", "Versions that are kept", ("store",)),
    Metric("tdserve_store_readers", "gauge", "Sessions that have read the weights", ("store",)),
    Metric(
        "tdserve_reader_lag_versions",
        "gauge",
        "Versions published since the one that a reader has",
        ("store", "reader"),
    ),
    Metric(
        "tdserve_reader_age_seconds",
        "gauge",
        "Time for which a newer version than a reader's own has been there; 0 if it has the newest",
        ("store", "reader"),
    ),
    # ------------------------------------------------------------ clusters
    Metric(
        "tdserve_store_degraded_sessions",
        "gauge",
        "Clients that report that shards of a cluster's store are out of reach",
        ("store",),
    ),
)
"""All metrics, in the order of the guide's page."""
