"""The figures of a server as JSON: the names of ``tdserve stats --json``, and what only a live screen shows."""

from __future__ import annotations

from typing import Any

from tdserve.cli.figures.server_figures import ServerFigures
from tdserve.cli.figures.sessions import flatten_session
from tdserve.cli.screen.hidden_figures import mark_hidden
from tdserve.client.session.catalog.message_facts import to_facts
from tdserve.messages.store_figures import find_num_rows, find_version
from tdserve.messages.store_kinds import name_counted_kind, name_kind


def describe_figures(found: ServerFigures) -> dict[str, Any]:
    """Returns the figures of a server; of one that does not answer only its address and the ``fault``."""
    facts: dict[str, Any] = {"server": found.server, "address": found.address}
    if found.figures is None:
        return {**facts, "fault": str(found.fault)}
    figures = found.figures
    facts |= to_facts(figures)
    facts["num_stores"] = sum(each.num_stores for each in figures.kinds)
    facts["kinds"] = {name_counted_kind(each): each.num_stores for each in figures.kinds}
    facts["transports"] = {each.pop("transport"): each for each in facts["transports"]}
    facts["sessions_by_transport"] = dict(figures.sessions_by_transport)
    facts["sessions"] = [flatten_session(each) for each in figures.sessions]
    facts["calls"] = [_describe_calls(each) for each in figures.calls]
    facts["stores"] = [_describe_store(each) for each in figures.stores]
    facts["other_stores"] = {**_describe_store(figures.other_stores), "name": "", "kind": ""}
    return mark_hidden(facts)


def _describe_calls(calls: Any) -> dict[str, Any]:
    errors = {each.code: each.num_calls for each in calls.errors}
    num_calls = sum(calls.buckets)
    return {"side": calls.side, "call": calls.call, "num_calls": num_calls, "sum_s": calls.sum_s, "errors": errors}


def _describe_store(store: Any) -> dict[str, Any]:
    facts = to_facts(store)
    described = facts.pop("description")
    kind = name_kind(store.description.kind, is_queue=store.is_queue)
    left_out = ("spec", "kind", "fingerprint", "versions")
    if find_num_rows(store) is None:
        described |= dict.fromkeys(("num_rows", "inserts", "samples"))  # null: not 0
    if find_version(store) is None:
        described["version"] = None
    return {**{name: value for name, value in described.items() if name not in left_out}, "kind": kind, **facts}
