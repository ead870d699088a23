from __future__ import annotations

import pytest
import torch

import tdserve
from tdserve.examples.collectors.collector import NUM_ROWS, Collector, choose_device
from tdserve.examples.collectors.task import Names, collect, make_policy, make_report

LIKE = collect(make_policy(), 1, torch.device("cpu"))[0]


def test_collector_when_weights_are_published_then_takes_the_newest_and_marks_its_rows(client: tdserve.Client) -> None:
    names = Names.of("marks")
    replay = client.create_replay(names.rows, like=LIKE, capacity=10 * NUM_ROWS)
    client.publish(names.policy, make_policy(), metadata={"is_last": False})
    collector = Collector(client, names, index=3, device=torch.device("cpu"))
    assert collector.follow()
    collector.extend()
    for _ in range(3):
        client.publish(names.policy, make_policy(), metadata={"is_last": False})
    assert collector.follow()
    assert collector.follow(), "without newer weights it goes on with those that it has"
    collector.extend()
    assert set(replay[:]["collector"].tolist()) == {3}
    assert replay[:]["version"].tolist() == [1] * NUM_ROWS + [4] * NUM_ROWS


def test_collector_when_the_last_weights_are_there_then_reports_its_start_and_its_rows(
    client: tdserve.Client,
) -> None:
    names = Names.of("last")
    client.create_replay(names.rows, like=LIKE, capacity=NUM_ROWS)
    reports = client.create_queue(names.reports, like=make_report()[0], max_size=2)
    client.publish(names.policy, make_policy(), metadata={"is_last": True})
    Collector(client, names, index=1, device=torch.device("cpu")).run()
    with reports.take(2, timeout_s=0) as rows:
        assert rows["collector"].tolist() == [1, 1]
        assert rows["num_versions"].tolist() == [0, 1]
        assert rows["num_rows"].tolist() == [0, 0]
        assert rows["device"] == ["cpu", "cpu"]


def test_device_when_there_is_no_gpu_then_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(1) == torch.device("cpu")


def test_device_when_there_are_gpus_then_each_collector_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(index).index for index in range(3)] == [0, 1, 0]
