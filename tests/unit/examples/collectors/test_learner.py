from __future__ import annotations

from contextlib import suppress
from threading import Thread

import pytest
import torch

import tdserve
from tdserve.base.errors import PeerLostError, TDServeError
from tdserve.examples.collectors.collector import Collector
from tdserve.examples.collectors.learner import VersionProgress, lead
from tdserve.examples.collectors.task import Names


def test_progress_when_printed_then_shows_rows_and_their_rate() -> None:
    assert str(VersionProgress(7, 12000, 3456.7, 0.5)) == "version   7: 12,000 rows (3,457/s), mean reward 0.50"


def test_lead_when_a_collector_takes_part_then_prints_what_it_did_and_removes_the_stores(
    server: tdserve.Server, client: tdserve.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def collect() -> None:
        Collector(client, Names.of("led"), index=0, device=torch.device("cpu")).run()

    thread = Thread(target=collect)
    lead(server.address, "led", num_collectors=1, num_versions=3, max_seconds=60.0, start=thread.start)
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "version   2",
        "version   3",
        "version   4",
        "collector 0 (cpu)",
    ]
    assert not set(Names.of("led")) & set(client.stores())


def test_lead_when_the_time_is_up_then_the_next_version_is_the_last(
    server: tdserve.Server, client: tdserve.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def collect() -> None:
        Collector(client, Names.of("brief"), index=0, device=torch.device("cpu")).run()

    thread = Thread(target=collect)
    lead(server.address, "brief", num_collectors=1, num_versions=1_000_000, max_seconds=1e-6, start=thread.start)
    thread.join()
    assert capsys.readouterr().out.count("version  ") == 1


def test_lead_when_the_check_raises_then_ends_and_removes_the_stores(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    def collect() -> None:
        with suppress(TDServeError):  # the stores go
            Collector(client, Names.of("broken"), index=0, device=torch.device("cpu")).run()

    def check() -> None:
        raise PeerLostError(peer="collector 0", reason="it died")

    thread = Thread(target=collect)
    with pytest.raises(PeerLostError, match="it died"):
        lead(
            server.address,
            "broken",
            num_collectors=1,
            num_versions=3,
            max_seconds=60.0,
            start=thread.start,
            check=check,
        )
    thread.join()
    assert not set(Names.of("broken")) & set(client.stores())
