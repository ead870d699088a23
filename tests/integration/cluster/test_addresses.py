"""A server that starts at another address is found there, also by a call that is under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.cluster.servers.cluster_servers import ClusterRecipe, ClusterServers
from tdserve.client.cluster.servers.membership import Membership
from tests.processes import wait_for

pytestmark = pytest.mark.integration


class ListedServers(Membership):
    """Servers that know their addresses."""

    def __init__(self, servers: list[tdserve.Server]) -> None:
        self.text, self.num_servers = "listed", len(servers)
        self._servers = servers

    def find(self, server: int) -> str:
        return self._servers[server].address


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_call_when_its_server_comes_back_elsewhere_then_goes_on_there_and_writes_once(
    tmp_path: Path, transport: str
) -> None:
    servers = [tdserve.Server(tmp_path / "root").start()]
    row = TensorDict({"number": torch.tensor(0)}, [])
    try:
        with tdserve.connect(servers[0].address, transport=transport) as single:  # type: ignore[arg-type]
            recipe = ClusterRecipe(single.recipe)
        membership = ListedServers(servers)
        with ClusterClient(ClusterServers(membership, recipe)) as client:
            table = client.create_replay("table", row, 1000)
            table.extend(TensorDict({"number": torch.arange(4)}, [4]))
            before = servers[0].address
            os.kill(servers[0].pid, signal.SIGKILL)
            wait_for(lambda: not servers[0].is_alive, "the end of the server")
            under_way = table.extend(TensorDict({"number": torch.arange(4, 8)}, [4]), return_early=True)
            servers[0].shutdown()
            servers[0] = tdserve.Server(tmp_path / "root").start()
            assert servers[0].address != before
            under_way.result(timeout=60)
            table.extend(TensorDict({"number": torch.arange(8, 12)}, [4]))
            assert sorted(table[:]["number"].tolist()) == list(range(12))
    finally:
        servers[0].shutdown()
