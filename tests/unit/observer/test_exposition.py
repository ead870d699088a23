"""tdserve/observer/exposition.py: the server's figures in Prometheus' words."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from tdserve.observer.exposition import FAULT_CODES, MAX_DEGRADED, MAX_READERS, OTHER
from tdserve.observer.metric_table import METRICS
from tdserve.observer.metrics_routes import encode
from tdserve.observer.snapshots import ServerSnapshot
from tdserve.v1 import control_pb2
from tests.unit.observer.figures import add_table, add_weights, make_figures

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

NASTY = (
    "<script>alert(1)</script>",
    'quote"brace}comma,equals=',
    "back\\slash",
    "line\nfeed",
    "carriage\rreturn",
    "nul\0 escape\x1b[31m bell\x07",
    "right-to-left \u202e override",
    "lone surrogate \ud800",
    "# HELP up x",
    "x" * 1_000_000,
    "y" * 200,
    "é" * 100,
    OTHER,
    "",
)


def expose(figures: control_pb2.ObserveResponse | None, accept: str = "") -> str:
    """Returns the text that a scrape gets."""
    content, _ = encode(ServerSnapshot(0.0, 0.125, figures, ""), accept)
    return content.decode()


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Returns all series, and fails if one is there twice."""
    samples = [sample for family in parse(text) for sample in family.samples]
    found = {(each.name, tuple(sorted(each.labels.items()))): float(each.value) for each in samples}
    assert len(found) == len(samples)
    return found


def get(text: str, name: str, **labels: str) -> float:
    """Returns the value of a series."""
    return read(text)[name, tuple(sorted(labels.items()))]


@pytest.fixture
def full() -> control_pb2.ObserveResponse:
    """Figures that have a value of every metric."""
    figures = make_figures(1)
    table = add_table(figures, "queue")
    table.is_queue, table.priority_sum, table.description.num_leased = True, 2.5, 3
    add_weights(figures, "policy")
    figures.other_stores.description.num_rows = 44
    figures.num_other_stores = 4
    figures.sessions.add(degraded=["shared"])
    return figures


def test_metrics_when_everything_has_a_value_then_all_of_the_table_are_there_and_no_others(full: Any) -> None:
    families = {family.name: family for family in parse(expose(full))}
    assert {name: family.type for name, family in families.items()} == {
        metric.name.removesuffix("_total"): metric.kind for metric in METRICS
    }
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.documentation == metric.text
        assert {*family.samples[0].labels} - {"le"} == {*metric.labels}


def test_metrics_when_named_then_by_the_rules_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.startswith("tdserve_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not {"ms", "milliseconds", "us", "kb", "mb", "count", "sum", "bucket"} & {*metric.name.split("_")[1:-1]}
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_values_when_exposed_then_as_the_server_has_counted(full: Any) -> None:
    text = expose(full)
    assert get(text, "tdserve_up") == 1
    assert get(text, "tdserve_start_time_seconds") == 940
    assert get(text, "tdserve_requests_total", side="control", call="sample", code="OK") == 7
    assert get(text, "tdserve_requests_total", side="control", call="sample", code="DEADLINE_EXCEEDED") == 1
    for code in FAULT_CODES:  # its first one is an increase
        assert get(text, "tdserve_requests_total", side="control", call="sample", code=code) == 0
    duration = {"side": "control", "call": "sample"}
    assert get(text, "tdserve_request_duration_seconds_bucket", le="5e-05", **duration) == 0
    assert get(text, "tdserve_request_duration_seconds_bucket", le="0.0001", **duration) == 7
    assert get(text, "tdserve_request_duration_seconds_bucket", le="30.0", **duration) == 7
    assert get(text, "tdserve_request_duration_seconds_count", **duration) == 8
    assert get(text, "tdserve_request_duration_seconds_sum", **duration) == 0.5
    assert get(text, "tdserve_transport_bytes_total", transport="gloo", direction="out") == 6
    assert get(text, "tdserve_sessions", transport="nccl") == 0
    assert get(text, "tdserve_store_samples_per_insert", store="queue") == 4
    assert get(text, "tdserve_store_queue_depth_rows", store="queue") == 5
    assert get(text, "tdserve_store_sample_age_seconds", store="queue") == 2.5
    assert get(text, "tdserve_store_sample_age_rows", store="queue") == 1_500
    assert get(text, "tdserve_store_sample_lag_versions", store="queue") == 1.5
    assert get(text, "tdserve_store_longest_wait_seconds", store="queue", call="sample") == 3
    assert get(text, "tdserve_reader_lag_versions", store="policy", reader="here:77:5") == 2
    assert get(text, "tdserve_store_rows", store=OTHER, kind=OTHER) == 44
    assert get(text, "tdserve_store_degraded_sessions", store="shared") == 1


def test_metrics_when_the_server_does_not_answer_then_down_and_nothing_else() -> None:
    assert read(expose(None)) == {("tdserve_up", ()): 0, ("tdserve_observe_seconds", ()): 0.125}


def test_metrics_when_openmetrics_is_accepted_then_its_parser_reads_the_same(full: Any) -> None:
    families = list(parse_openmetrics(expose(full, OPENMETRICS)))  # type: ignore[no-untyped-call]
    assert len(families) == len(METRICS)


def test_names_when_malicious_then_each_has_series_of_its_own_and_nothing_else_changes() -> None:
    figures = make_figures()
    plain = expose(figures)
    for name in NASTY:
        try:
            add_table(figures, name)
        except (UnicodeEncodeError, ValueError):  # no message can have it
            continue
    figures.other_stores.description.num_rows = 1
    text = expose(figures)
    rows = [labels for name, labels in read(text) if name == "tdserve_store_rows"]
    assert len(rows) == len(figures.stores) + 1
    assert all(len(line) < 400 for line in text.splitlines())
    assert all(each.isprintable() for line in text.split("\n") for each in line)
    of_server = {series for series in read(text) if "store" not in series[0]}
    assert of_server == {series for series in read(plain) if "store" not in series[0]}


def test_series_when_there_are_very_many_readers_and_reports_then_bounded() -> None:
    figures = make_figures()
    for number in range(20):
        store = add_weights(figures, f"w{number}")
        for session in range(100):
            store.readers.add(session=session, host="x" * 5_000, pid=1)
    for number in range(1_000):
        figures.sessions.add(degraded=[f"s{number}"])
    series = read(expose(figures))
    assert sum(name == "tdserve_reader_lag_versions" for name, _ in series) == MAX_READERS
    assert sum(name == "tdserve_store_degraded_sessions" for name, _ in series) == MAX_DEGRADED + 1
    assert series["tdserve_store_degraded_sessions", (("store", OTHER),)] == 900


def test_checkpoints_when_none_is_known_then_their_age_is_that_of_the_server_if_it_writes_them(
    full: control_pb2.ObserveResponse,
) -> None:
    assert get(expose(full), "tdserve_checkpoint_age_seconds") == 5.0
    full.checkpoint = ""
    assert get(expose(full), "tdserve_checkpoint_age_seconds") == full.uptime_s
    full.checkpoint_interval_s = 0.0
    assert "tdserve_checkpoint" not in expose(full)


def test_weights_when_they_were_not_opened_then_there_is_no_version() -> None:
    figures = make_figures()
    store = add_weights(figures, "policy")
    assert get(expose(figures), "tdserve_store_newest_version", store="policy") == 9
    store.is_open = False
    store.description.version = 0
    text = expose(figures)
    assert 'tdserve_store_bytes{kind="weights",store="policy"}' in text
    assert not any(name.startswith("tdserve_store_newest_version") for name, _ in read(text))
