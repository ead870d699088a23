from __future__ import annotations

import re
from contextlib import suppress
from threading import Thread

import pytest
import torch

import tdserve
from tdserve.base.errors import TDServeError
from tdserve.examples.collectors.collector import Collector
from tdserve.examples.collectors.task import Names
from tdserve.examples.collectors.training import lead


def start_collector(server: tdserve.Server, run: str) -> Thread:
    """Starts a collector with a client of its own."""

    def collect() -> None:
        with server.client() as client, suppress(TDServeError):  # the stores may go
            Collector(client, Names.of(run), index=0, device=torch.device("cpu")).run()

    thread = Thread(target=collect)
    thread.start()
    return thread


@pytest.mark.slow
def test_lead_when_a_collector_takes_part_then_prints_its_rows_and_removes_the_stores(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    thread = start_collector(server, "led")
    lines = list(lead(client, "led", num_collectors=1, num_versions=3, max_seconds=60.0))
    thread.join()
    assert [line.partition(":")[0] for line in lines] == [
        "version   2",
        "version   3",
        "version   4",
        "collector 0 (cpu)",
    ]
    assert re.fullmatch(r"version   4: [\d,]+ rows \([\d,]+/s\), mean reward [01]\.\d\d", lines[2])
    assert not set(Names.of("led")) & set(client.stores())


@pytest.mark.slow
def test_lead_when_the_time_is_up_then_the_next_version_is_the_last(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    thread = start_collector(server, "brief")
    lines = list(lead(client, "brief", num_collectors=1, num_versions=1_000_000, max_seconds=1e-6))
    thread.join()
    assert [line.split()[0] for line in lines] == ["version", "collector"]


@pytest.mark.slow
def test_lead_when_it_is_closed_then_removes_the_stores(server: tdserve.Server, client: tdserve.Client) -> None:
    thread = start_collector(server, "broken")
    lines = lead(client, "broken", num_collectors=1, num_versions=3, max_seconds=60.0)
    assert next(lines).startswith("version   2")
    lines.close()
    thread.join()
    assert not set(Names.of("broken")) & set(client.stores())
