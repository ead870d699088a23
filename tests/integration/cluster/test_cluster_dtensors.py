"""Sharded weights whose parts several servers have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tdserve
from tdserve import dtensor
from tests.integration.cluster.names import next_name
from tests.integration.forked_clients import ForkedClients
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_RANKS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedClients]:
    with ForkedClients("tests.integration.dtensor_roles") as started:
        yield started


def name_apart(client: tdserve.ClusterClient) -> list[str]:
    """Returns names of weights and their parts that three servers divide."""
    while True:
        name = next_name()
        stores = [name, *(f"{name}.part-{rank}" for rank in range(NUM_RANKS))]
        if len({client.get_home(store).address for store in stores}) == len(stores):
            return stores


def test_parts_when_several_servers_have_them_then_readers_join_them(
    ranks: ForkedClients, user: tdserve.ClusterClient, address: str, tmp_path: Path
) -> None:
    stores = name_apart(user)
    options: dict[str, Any] = {"folder": str(tmp_path), "size": NUM_RANKS, "num_versions": 2, "keep": 1}
    children = [ranks.start("publish_numbers", address, stores[0], rank=rank, **options) for rank in range(NUM_RANKS)]
    assert [child.rest() for child in children] == [["done 2"]] * NUM_RANKS
    assert {*stores} <= {*user.stores(stores[0])}
    into = {key: torch.zeros(5 * NUM_RANKS + 1, 300) for key in "abc"}
    found = dtensor.latest(user, stores[0], into=into)
    assert found is not None
    assert found.version == 2
    assert all(bool((leaf == 2).all()) for leaf in into.values())


def test_subscription_when_closed_while_another_thread_waits_then_the_iteration_ends(
    user: tdserve.ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.client.weights.subscription.STEP_S", 40.0)
    name, *_ = name_apart(user)
    into = {"a": torch.zeros(2)}
    with dtensor.subscribe(user, name, into=into, timeout_s=20.0) as versions, ThreadPoolExecutor(1) as thread:
        for number in (1, 2):
            dtensor.publish(user, name, {"a": torch.full((2,), float(number))})
            assert next(versions).version == number
            assert into["a"].tolist() == [number] * 2
        later = thread.submit(lambda: next(versions, None))
        wait_for(lambda: user.describe(name).num_waiting, "a request")
        versions.close()
        assert later.result(20.0) is None
    dtensor.delete(user, name)
