"""Stores with rows that a local writer has left half written. They move and are copied as they are: the rows are lost
there too, until they are written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tdserve
from tests.integration.cluster.moving import choose_other
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, rows

pytestmark = pytest.mark.integration

KEY = "first"
TOTAL = 2 * NUM_ROWS


@pytest.fixture
def damaged(client: tdserve.ClusterClient, name: str, forked_clients: ForkedClients) -> tdserve.StoreHandle:
    """A store that has lost one key of the first half of its rows."""
    client.memmap(rows(1, TOTAL), name)
    address = client.members.get(client.find_server(name)).address
    with forked_clients.start("write", address, "overwrite_key", name, 2, at=0) as writer:
        assert writer.line() == "connected shm"
        writer.wait_killed()
    handle = client[name]
    assert isinstance(handle, tdserve.StoreHandle)
    return handle


def check_lost_until_written(handle: tdserve.StoreHandle) -> None:
    """Checks that the first half is unreadable until its key is written."""
    with pytest.raises(tdserve.CorruptDataError, match="writer died while it overwrote"):
        handle[3]
    assert handle[NUM_ROWS:][KEY].tolist() == [1] * NUM_ROWS
    handle.set_at_(KEY, torch.full((NUM_ROWS,), 3), slice(0, NUM_ROWS))
    assert handle[:][KEY].tolist() == [3] * NUM_ROWS + [1] * NUM_ROWS


@pytest.mark.slow
def test_store_when_it_moves_then_its_rows_are_lost_at_the_target(
    client: tdserve.ClusterClient, name: str, damaged: tdserve.StoreHandle
) -> None:
    home, target = client.find_server(name), choose_other(client, name)
    assert client.rebalance(name, target, timeout_s=20.0) == target
    assert client.rebalance(name, home, timeout_s=20.0) == home
    check_lost_until_written(damaged)


@pytest.mark.slow
def test_store_when_restored_then_its_rows_are_lost_in_the_copy_and_in_the_original(
    client: tdserve.ClusterClient, name: str, damaged: tdserve.StoreHandle, tmp_path: Path
) -> None:
    client.checkpoint(str(tmp_path))
    (copy,) = client.restore(str(tmp_path), prefix="copy-", names=[name])
    try:
        handle = client[copy]
        assert isinstance(handle, tdserve.StoreHandle)
        check_lost_until_written(handle)
        check_lost_until_written(damaged)
    finally:
        client.delete(copy)
