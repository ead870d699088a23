from __future__ import annotations

from contextlib import closing

import pytest

from tdserve.base.config import TransportName
from tdserve.bench.child import Child
from tdserve.bench.measure import Pacing
from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage
from tdserve.bench.workload_data import make_transitions
from tdserve.bench.workloads.many_clients import EXTEND_ROWS, POOL_ROWS, describe_cpu, run_together, work_as_client


def test_cpu_when_described_then_each_part_allows_a_rate_and_the_cores_bear_all_of_them() -> None:
    available = {"control": 1, "workers": 3, "cores": 4}
    assert describe_cpu({"control": 100.0, "workers": 200.0, "client": 500.0}, available) == {
        "control CPU": 100.0,
        "workers CPU": 200.0,
        "client CPU": 500.0,
        "calculated: control": 10_000.0,
        "calculated: workers": 15_000.0,
        "calculated: cores": 5_000.0,
    }


def test_cpu_when_a_part_spends_next_to_nothing_then_it_allows_any_rate() -> None:
    details = describe_cpu({"control": 0.0, "client": 40.0}, {"control": 1, "cores": 2})
    assert details == {"control CPU": 0.0, "client CPU": 40.0, "calculated: cores": 50_000.0}


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.once("gloo")
@pytest.mark.usefixtures("borrows_nothing")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_clients_when_they_run_together_then_all_their_calls_are_counted_and_the_server_pays_for_them(
    stage: Stage, transport: TransportName
) -> None:
    rows = make_transitions(POOL_ROWS).rows
    replay = stage.client.create_replay("shared", rows[0], POOL_ROWS)
    try:
        replay.extend(rows[:EXTEND_ROWS])
        with (
            closing(Child(work_as_client, stage.address, transport, "shared")) as reader,
            closing(Child(work_as_client, stage.address, transport, "shared")) as writer,
        ):
            clients = {reader: "samples", writer: "extends"}
            for client, role in clients.items():
                client.recv()
                client.ask(role)
            done = run_together(clients, {"control": stage.servers["control"], "workers": []}, Pacing(0.1))
            for client in clients:
                client.ask(None)
        num_extends = replay.info()["inserts"] // EXTEND_ROWS - 1
    finally:
        stage.client.delete("shared")
    assert done.elapsed_s >= 0.1
    assert done.details["extends/s"] * done.elapsed_s == pytest.approx(num_extends)
    assert done.details["samples/s"] * done.elapsed_s == pytest.approx(len(done.op_s) - num_extends)
    assert done.details["control CPU"] > 0.0
    assert done.details["client CPU"] > 0.0


@pytest.mark.integration
@pytest.mark.full
def test_clients_when_measured_then_each_number_of_them_has_figures_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure(stage, "clients"))
    assert [figure.name for figure in figures] == [
        "bare gloo, 256 rows asked for",
        "bare gloo, 64 rows acknowledged",
        "sample 256, 1 client",
        "sample 256, 2 clients",
        "extend 64, 1 client",
        "extend 64, 2 clients",
        "sample and extend, 2 clients",
    ]
    for figure in figures:
        assert figure.median > 0
        assert figure.name.startswith("bare") or figure.details["calculated: cores"] > 0
    assert stage.client.stores() == []
