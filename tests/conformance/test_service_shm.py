"""The service over shared memory takes the same exam; and what only clients on the server's machine can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.conformance.service_suite import LARGE, SMALL, ServiceSuite, assert_equal, rows
from tests.conformance.suite import Connect
from tests.processes import wait_for


class TestSharedMemoryService(ServiceSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="shm")

    @pytest.fixture
    def transport(self) -> str:
        return "shm"

    def test_stats_when_content_moved_then_name_the_transport(
        self, client: tdserve.Client, name: str, transport: str
    ) -> None:
        """As over the other transports, except that the server moves no byte."""
        before = client.stats()["transports"]
        replay = client.create_replay(f"{name}-rows", rows(1)[0], LARGE)
        replay.extend(rows(LARGE))
        replay.sample(LARGE)
        client.publish(f"{name}-weights", rows(LARGE))
        client.latest(f"{name}-weights")
        client.init_remote(rows(LARGE), name)
        client.send(rows(LARGE), name)
        client.from_remote_init(name)
        after = client.stats()
        assert after["transport"] == transport
        mine = next(each for each in after["sessions"] if each["session"] == after["session"])
        assert mine["transport"] == transport
        moved = {
            key: value - before.get(transport, {}).get(key, 0) for key, value in after["transports"]["shm"].items()
        }
        assert (moved.pop("transfers_in"), moved.pop("transfers_out")) == (4, 3)
        assert set(moved.values()) == {0}
        others = [{k: v for k, v in each.items() if k != transport} for each in (before, after["transports"])]
        assert others[0] == others[1], "something went another way"

    def test_connect_when_automatic_then_shared_memory(self, server: tdserve.Server, name: str) -> None:
        locks = Path(server.config.root) / "sessions"
        others = set(locks.iterdir())  # such as that of the client that this process keeps for unpickled handles
        with server.client() as client:
            client.init_remote(rows(SMALL), name)
            assert client.stats()["transport"] == "shm"
            assert set(locks.iterdir()) - others
        wait_for(lambda: others >= set(locks.iterdir()), "the removal of its lock")

    @pytest.mark.slow
    @pytest.mark.parametrize("num_rows", [0, SMALL, LARGE])
    def test_latest_when_mapped_then_equal_and_ones_own(self, client: tdserve.Client, name: str, num_rows: int) -> None:
        client.publish(name, rows(num_rows))
        first, second = client.latest(name, copy=False), client.latest(name, copy=False)
        assert first is not None
        assert second is not None
        assert_equal(first.data, rows(num_rows))
        first.data["number"] += 1
        assert_equal(second.data, rows(num_rows))
        found = client.latest(name)
        assert found is not None
        assert_equal(found.data, rows(num_rows))

    def test_extend_when_leaves_are_not_contiguous_or_left_out_then_equal(
        self, client: tdserve.Client, name: str
    ) -> None:
        replay = client.create_replay(name, rows(1)[0], 3 * SMALL)
        wide = torch.rand(60, SMALL).T
        content = TensorDict({"number": torch.arange(2 * SMALL)[::2], "nested": rows(SMALL)["nested"]}, [SMALL])
        content["nested", "wide"] = wide
        index = replay.extend(content)
        assert_equal(replay[index].exclude("index", "generation"), content)
        index = replay.extend(rows(SMALL).select("number"))
        found = replay.sample(SMALL, require=["number"])
        assert torch.equal(replay[index]["nested", "wide"], torch.zeros(SMALL, 60))
        assert len(found) == SMALL
