"""tdserve/cli/screen/hidden_figures.py: what a token hides is not shown as 0."""

from __future__ import annotations

from typing import Any

from tdserve.cli.figures.figure_facts import describe_figures
from tdserve.cli.figures.server_figures import ServerFigures
from tdserve.cli.screen.hidden_figures import OF_WHOLE_SERVER, mark_hidden
from tdserve.cli.stores.info import make_fact_rows
from tdserve.client.session.catalog.message_facts import convert_stats
from tdserve.v1 import control_pb2


def make_stats(*, has_workers: bool) -> dict[str, Any]:
    """Returns the figures of a server that its token hides, or not."""
    workers = [control_pb2.WorkerStats(is_ready=True)] if has_workers else []
    return convert_stats(control_pb2.GetStatsResponse(server_id="s", num_sessions=2, workers=workers))


def test_facts_when_the_token_hides_those_of_the_server_then_none() -> None:
    found = mark_hidden(make_stats(has_workers=False))
    assert {name for name, value in found.items() if value is None} == OF_WHOLE_SERVER & found.keys()
    assert (found["server_id"], found["num_sessions"]) == ("s", 2)
    assert ("root_free_bytes", "-") in make_fact_rows(found)
    observed = describe_figures(ServerFigures(0, "a", control_pb2.ObserveResponse(server_id="s")))
    assert {name for name, value in observed.items() if value is None} == (OF_WHOLE_SERVER & observed.keys())
    assert OF_WHOLE_SERVER & (observed.keys() | found.keys()) == OF_WHOLE_SERVER


def test_facts_when_the_token_shows_those_of_the_server_then_as_they_are() -> None:
    stats = make_stats(has_workers=True)
    assert mark_hidden(stats) == stats


def test_facts_when_they_are_of_several_servers_then_those_of_each() -> None:
    found = mark_hidden({"servers": {0: make_stats(has_workers=False), 1: make_stats(has_workers=True)}, "lost": []})
    assert [found["servers"][number]["root_free_bytes"] for number in (0, 1)] == [None, 0]


def test_figures_when_a_new_one_is_added_then_it_is_of_the_whole_server_or_of_what_a_token_sees() -> None:
    seen_by_all = {"server_id", "version", "uptime_s", "time_s", "start_time_s", "observer"}
    of_its_stores = {"num_stores", "kinds", "stores", "other_stores", "num_other_stores"}
    of_its_sessions = {"num_sessions", "sessions", "sessions_by_transport"}
    messages = control_pb2.GetStatsResponse, control_pb2.ObserveResponse
    fields = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    assert fields - OF_WHOLE_SERVER == seen_by_all | of_its_stores | of_its_sessions
