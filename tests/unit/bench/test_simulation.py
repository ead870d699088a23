"""The simulated cluster: it repeats itself, loses nothing, and its samples have the distribution of one table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tdserve.bench.call_costs import CallCosts
from tdserve.bench.simulated_cluster import Scenario, SimulatedCluster
from tdserve.bench.simulated_time import Process, SimulatedTime, Station
from tdserve.bench.simulation import ASSUMPTIONS, run_simulation, simulate
from tdserve.rules.lost_servers import PROBE_INTERVAL_S, REACH_S

SMALL = Scenario(num_servers=6, num_clients=24, num_stores=3, num_shards=4, learn_s=0.1, act_s=0.1, part_rows=512)


def test_time_when_processes_wait_then_they_run_in_order_of_time_and_of_their_waits() -> None:
    time, seen = SimulatedTime(), []

    def work(name: str, pause_s: float) -> Process:
        while True:
            yield pause_s
            seen.append((name, time.now_s))

    time.start(work("slow", 2.0))
    time.start(work("fast", 1.0))
    time.run(2.5)
    assert seen == [("fast", 1.0), ("slow", 2.0), ("fast", 2.0)]
    assert time.now_s == 2.5


def test_station_when_requests_arrive_at_once_then_they_are_served_one_after_the_other() -> None:
    station = Station()
    assert [station.serve(1.0, 0.5), station.serve(1.0, 0.5), station.serve(9.0, 0.5)] == [1.5, 2.0, 9.5]
    assert station.busy_s == 1.5


@pytest.mark.slow
def test_simulation_when_the_seed_is_the_same_then_repeats_itself() -> None:
    assert simulate(SMALL) == simulate(SMALL)
    assert simulate(SMALL) != simulate(replace(SMALL, seed=1))


@pytest.mark.slow
def test_simulation_when_no_server_is_lost_then_all_calls_take_their_time_and_count_in_the_tables() -> None:
    cluster = SimulatedCluster(replace(SMALL, lost_at_s=9.0))
    tally = cluster.run()
    assert min(tally.num_calls.values()) > 200
    assert max(map(max, tally.waits_s.values())) < 0.05
    assert tally.num_redirected == tally.num_beside == len(tally.noticed_s) == 0
    parts = [part for server in cluster.servers for part in server.parts.values()]
    assert len(parts) == 12
    num_under_way = SMALL.num_clients  # the tables change before the answers arrive
    num_extends = (sum(part.counts.inserts for part in parts) - 12 * 256) / SMALL.extend_rows
    assert tally.num_calls["extend"] <= num_extends <= tally.num_calls["extend"] + num_under_way
    num_samples = sum(part.counts.samples for part in parts) / SMALL.sample_rows
    assert tally.num_calls["sample"] <= num_samples <= tally.num_calls["sample"] + num_under_way


@pytest.mark.slow
def test_simulation_when_a_server_is_lost_then_each_client_waits_once_and_the_others_rows_go_on() -> None:
    cluster = SimulatedCluster(SMALL)
    tally = cluster.run()
    num_concerned = sum(cluster.lost in servers for servers in cluster.placements) * SMALL.num_clients // 3
    assert 0 < len(tally.noticed_s) <= num_concerned
    assert min(tally.noticed_s) >= SMALL.lost_at_s + REACH_S
    assert 0 < tally.num_slow <= len(tally.noticed_s) < tally.num_beside
    assert max(tally.waits_s["sample"]) < REACH_S + 0.1
    assert tally.num_redirected > 0
    assert len(tally.found_s) == len(tally.noticed_s)
    assert max(tally.found_s) < SMALL.back_at_s + PROBE_INTERVAL_S + 1.0  # and the pause between its calls


@pytest.mark.full
def test_simulation_when_control_is_slow_then_its_server_is_busy_and_calls_wait() -> None:
    slow = simulate(replace(SMALL, lost_at_s=9.0), CallCosts(control_s=2e-3))
    fast = simulate(replace(SMALL, lost_at_s=9.0))
    assert slow["busy, hottest server %"] == slow["busy, its control %"] > 10 * fast["busy, its control %"]
    assert slow["sample p50 ms"] > fast["sample p50 ms"] + 4
    assert slow["busy, hottest server %"] <= 110


@pytest.mark.full
def test_report_when_printed_then_lists_its_assumptions_and_the_file_has_all_figures(tmp_path: Path) -> None:
    console, path = Console(file=io.StringIO(), width=300), tmp_path / "figures.json"
    assert run_simulation([SMALL, replace(SMALL, num_shards=6)], json_path=path, console=console) == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "simulated, not measured: 6 servers, 24 clients, 3 tables of 4 shards" in text
    assert all(line in text for line in ASSUMPTIONS.splitlines())
    content = json.loads(path.read_text())
    assert [run["scenario"]["num_shards"] for run in content["simulated"]] == [4, 6]
    assert content["simulated"][0]["seen"] == simulate(SMALL)
    ages = list(content["ages"].values())
    assert ages[0]["rows of a part: chi-square / freedom"] < 3.5  # of 7 degrees of freedom, once in a thousand
    distances = [seen["shares of parts: mean distance %"] for seen in ages]
    assert distances == sorted(distances)
    assert distances[0] * 5 < distances[1]
