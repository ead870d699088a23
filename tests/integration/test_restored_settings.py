"""Tables from a checkpoint, when programs then create them with settings of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import StoreExistsError
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"number": torch.tensor(0), "body": torch.zeros(300)}, [])


def make_rows(num_rows: int) -> TensorDict:
    return TensorDict({"number": torch.arange(num_rows), "body": torch.zeros(num_rows, 300)}, [num_rows])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server that has a table from a checkpoint."""
    place = tmp_path / "place"
    with tdserve.Server(tmp_path / "first") as first, first.client() as client:
        client.create_replay("table", ROW, 200, min_size=150).extend(make_rows(90))
        client.checkpoint(place)
    with tdserve.Server(tmp_path / "root") as made:
        with made.client() as client:
            client.restore(place)
        yield made


@pytest.fixture(params=["shm", "gloo"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param) as made:
        yield made


@pytest.mark.slow
def test_table_when_first_asked_for_with_others_then_has_those_and_is_ordinary_afterwards(
    client: tdserve.Client, server: tdserve.Server, caplog: pytest.LogCaptureFixture
) -> None:
    wanted: dict[str, Any] = {"sampler": tdserve.Prioritized(alpha=1.0, eps=0.0), "min_size": 20, "exists_ok": True}
    with caplog.at_level(logging.INFO, "tdserve.client"):
        table = client.create_replay("table", ROW, 200, **wanted)
    assert sum("from a checkpoint" in each.message for each in caplog.records) == 1
    assert len(table) == 90
    assert table.get_priorities(torch.arange(90)).tolist() == [1.0] * 90
    table.update_priority(torch.arange(89), torch.zeros(89))
    assert set(table.sample(64)["number"].tolist()) == {89}
    with pytest.raises(StoreExistsError, match="sampler"):
        client.create_replay("table", ROW, 200, min_size=150, exists_ok=True)
    client.close()
    server.shutdown()
    server.start()
    with server.client(transport=client.transport) as later:
        table = later.create_replay("table", ROW, 200, **wanted)
        assert set(table.sample(64)["number"].tolist()) == {89}
        with pytest.raises(StoreExistsError, match="sampler"):
            later.create_replay("table", ROW, 200, min_size=150, exists_ok=True)


@pytest.mark.slow
def test_handle_when_made_before_the_settings_changed_then_goes_on_with_them(client: tdserve.Client) -> None:
    before = client.replay("table")
    client.create_replay("table", ROW, 200, sampler=tdserve.Prioritized(), min_size=1, exists_ok=True)
    assert before.extend(make_rows(1)).tolist() == [90]
    for num_rows in (2, 64):
        assert "priority" in before.sample(num_rows)
    assert before.settings == client.replay("table").settings


@pytest.mark.slow
def test_call_when_it_waits_for_the_former_limiter_then_goes_on_by_the_new_one(client: tdserve.Client) -> None:
    before = client.replay("table")
    with ThreadPoolExecutor(1) as pool:
        sample = pool.submit(before.sample, 8, timeout_s=60.0)
        wait_for(lambda: client.describe("table").num_waiting == 1, "a sample that waits")
        client.create_replay("table", ROW, 200, min_size=10, exists_ok=True)
        assert sample.result()["number"].shape == (8,)


@pytest.mark.slow
def test_table_when_more_differs_than_may_change_then_refused_and_still_takes_settings_later(
    client: tdserve.Client,
) -> None:
    others: tuple[dict[str, Any], ...] = ({"capacity": 100}, {"capacity": 200, "max_times_sampled": 2})
    for other in others:
        with pytest.raises(StoreExistsError):
            client.create_replay("table", ROW, min_size=1, exists_ok=True, **other)
    with pytest.raises(StoreExistsError):
        client.create_replay("table", TensorDict({"other": torch.zeros(2)}, []), 200, min_size=1, exists_ok=True)
    with pytest.raises(StoreExistsError):
        client.create_replay("table", ROW, 200, min_size=1)
    assert client.create_replay("table", ROW, 200, min_size=1, exists_ok=True).sample(4)["number"].shape == (4,)


@pytest.mark.slow
def test_table_when_first_asked_for_with_its_own_then_ordinary(client: tdserve.Client) -> None:
    client.create_replay("table", ROW, 200, min_size=150, exists_ok=True)
    with pytest.raises(StoreExistsError, match="limiter"):
        client.create_replay("table", ROW, 200, min_size=1, exists_ok=True)


@pytest.mark.slow
def test_table_when_consumers_have_rows_on_lease_then_refused_until_they_are_acknowledged(
    client: tdserve.Client,
) -> None:
    before = client.replay("table")
    before.set_limiter(tdserve.MinSize(1))
    with before.take(4, consumer="c"), pytest.raises(StoreExistsError, match="on lease"):
        client.create_replay("table", ROW, 200, sampler=tdserve.Prioritized(), exists_ok=True)
    client.create_replay("table", ROW, 200, sampler=tdserve.Prioritized(), exists_ok=True)
    assert "priority" in before.sample(4)
