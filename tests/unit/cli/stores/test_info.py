"""tdserve/cli/stores/info.py: facts as rows."""

from __future__ import annotations

import time

from tdserve.cli.stores.info import make_fact_rows


def test_facts_when_shown_then_bytes_and_moments_are_readable() -> None:
    facts = {"nbytes": 2048, "root_free_bytes": 1 << 30, "num_rows": 2048, "created_s": 0.0, "path": "stores/a\x1b"}
    assert make_fact_rows(facts) == [
        ("nbytes", "2 KiB"),
        ("root_free_bytes", "1 GiB"),
        ("num_rows", "2048"),
        ("created_s", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))),
        ("path", "stores/a\\x1b"),
    ]


def test_facts_when_a_list_of_mappings_then_one_row_each() -> None:
    facts = {"workers": [{"pid": 1, "bytes_in": 1024}, {"pid": 2, "bytes_in": 0}], "extra": ["a.shape"], "none": []}
    assert make_fact_rows(facts) == [
        ("workers[0]", "pid 1, bytes_in 1 KiB"),
        ("workers[1]", "pid 2, bytes_in 0 B"),
        ("extra", "['a.shape']"),
        ("none", "[]"),
    ]


def test_facts_when_a_mapping_then_one_row() -> None:
    assert make_fact_rows({"gloo": {"transfers_in": 3}}) == [("gloo", "transfers_in 3")]


def test_facts_when_a_mapping_has_mappings_then_one_row_each() -> None:
    facts = {"transports": {"gloo": {"bytes_in": 1024}}, "settings": {"sampler": {"kind": "fifo"}, "is_queue": True}}
    assert make_fact_rows({**facts, "none": {}}) == [
        ("transports[gloo]", "bytes_in 1 KiB"),
        ("settings[sampler]", "kind fifo"),
        ("settings[is_queue]", "True"),
        ("none", ""),
    ]


def test_facts_when_a_time_is_a_duration_then_with_units() -> None:
    assert make_fact_rows({"uptime_s": 3725.25, "other_s": 1.5}) == [("uptime_s", "1 h 2 min"), ("other_s", "1.5")]
