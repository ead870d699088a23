from __future__ import annotations

from tdserve.cli.figures.figure_facts import describe_figures
from tdserve.cli.figures.server_figures import ServerFigures
from tdserve.v1 import control_pb2


def test_store_when_it_was_not_opened_then_its_version_and_rows_are_none() -> None:
    figures = control_pb2.ObserveResponse()
    store = figures.stores.add()
    store.description.name, store.description.kind = "policy", control_pb2.STORE_KIND_WEIGHTS
    (facts,) = describe_figures(ServerFigures(0, "a", figures))["stores"]
    assert (facts["name"], facts["version"], facts["num_rows"]) == ("policy", None, None)
    store.is_open, store.description.version = True, 3
    (facts,) = describe_figures(ServerFigures(0, "a", figures))["stores"]
    assert (facts["version"], facts["num_rows"]) == (3, 0)
