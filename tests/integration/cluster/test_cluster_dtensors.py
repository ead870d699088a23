"""Sharded weights whose parts several servers have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdserve
from tdserve import dtensor
from tests.integration.cluster.names import next_name
from tests.integration.forked_clients import ForkedClients

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
