"""Servers as actors of Ray: the released package, on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, RootInUseError
from tdserve.store.roots.root import Root
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Writer
from tests.processes import START_TIMEOUT_S, wait_for

ray = pytest.importorskip("ray")

import tdserve.ray as tdserve_ray  # noqa: E402
from tdserve.examples import ray_replay  # noqa: E402
from tdserve.ray.ray_membership import RayMembership  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # of ray and its threads
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(300),
]

NUM_SERVERS = 2
QUICK = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000}
"""Options of a node."""


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Returns rows that have numbers."""
    return TensorDict({"number": torch.arange(start, start + num_rows)}, [num_rows])


def control_process_of(root: Path) -> int:
    """Returns the process that owns a root."""
    with pytest.raises(RootInUseError) as caught:
        Root.acquire(str(root))
    return int(str(caught.value.fields["holder"]).split()[1])


class TestOneNode:
    """Servers of a cluster that has one node."""

    @pytest.fixture(scope="class", autouse=True)
    def node(self) -> Iterator[None]:
        """Ray on this machine."""
        ray.init("local", log_to_driver=False, logging_level="error", **QUICK)
        yield
        ray.shutdown()

    @pytest.fixture(scope="class")
    def storage(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The path of all servers."""
        return tmp_path_factory.mktemp("storage")

    @pytest.fixture(scope="class")
    def servers(self, node: None, storage: Path) -> Iterator[tdserve_ray.RayServers]:
        """Two servers."""
        with tdserve_ray.start(NUM_SERVERS, storage=storage, name="two", resources={"CPU": 0.5}) as started:
            yield started

    @pytest.fixture
    def client(self, servers: tdserve_ray.RayServers) -> Iterator[tdserve.ClusterClient]:
        """A client of them."""
        with servers.client() as made:
            yield made

    @pytest.mark.full
    def test_example_when_run_then_the_learner_draws_what_tasks_have_written(
        self, servers: tdserve_ray.RayServers, client: tdserve.ClusterClient
    ) -> None:
        mean = ray_replay.run(servers.address, num_actors=1, num_batches=3)
        assert 0.0 <= mean <= 1.0
        table = client.replay(ray_replay.TABLE)
        assert len(table) == ray_replay.NUM_EPISODES * ray_replay.EPISODE_STEPS
        assert isinstance(table, tdserve.ShardedReplayHandle)
        assert len({int(row) // table.part_capacity for row in table.sample(200)["index"]}) == NUM_SERVERS

    @pytest.mark.full
    def test_example_when_ray_train_learns_then_its_workers_share_each_draw(
        self, servers: tdserve_ray.RayServers, client: tdserve.ClusterClient
    ) -> None:
        ray_train = pytest.importorskip("tdserve.examples.ray_train", exc_type=ImportError)  # needs ray[train]
        if ray_train.TABLE in client:
            client.delete(ray_train.TABLE)
        assert 0.0 <= ray_train.run(servers.address, num_actors=1, num_steps=5) < 10.0
        assert client.replay(ray_train.TABLE).info()["samples"] == 2 * 5 * ray_replay.BATCH_SIZE

    @pytest.mark.slow
    def test_server_when_asked_without_its_token_then_refuses(self, servers: tdserve_ray.RayServers) -> None:
        with pytest.raises(tdserve.UnauthenticatedError):
            tdserve.connect(RayMembership(servers.address).find(0))
        with servers.client(token="another") as other, pytest.raises(tdserve.UnauthenticatedError):
            other.stores()

    @pytest.mark.slow
    def test_client_when_a_server_is_killed_then_draws_its_rows_again_from_another_address(
        self, servers: tdserve_ray.RayServers, client: tdserve.ClusterClient, storage: Path
    ) -> None:
        table = client.create_replay(next_name(), rows(1)[0], 1_000, shards="all")
        writers = [next(each for each in range(1, 99) if table.choose_shard(each) == shard) for shard in (0, 1)]
        for shard, writer in enumerate(writers):
            table.extend(rows(10, 10 * shard), writer=writer)
        lost = table.placement.servers[1]
        before = client.members.get(lost).address
        os.kill(control_process_of(storage / "two" / f"server-{lost}"), signal.SIGKILL)
        wait_for(lambda: lost in _sample(client, table)["lost"], "a sample without the server")
        wait_for(lambda: max(_sample(client, table)["numbers"]) >= 10, "rows of the server", timeout_s=START_TIMEOUT_S)
        assert client.members.get(lost).address != before
        assert sorted(table[:]["number"].tolist()) == list(range(20))

    @pytest.mark.slow
    def test_start_when_it_cannot_be_then_refused_and_nothing_is_left(
        self, servers: tdserve_ray.RayServers, storage: Path
    ) -> None:
        with pytest.raises(InvalidRequestError, match="servers of this name run"):
            tdserve_ray.start(NUM_SERVERS, storage=storage, name="two")
        with pytest.raises(DeadlineExceededError, match="'CPU': 9"):
            tdserve_ray.start(1, storage=storage, name="large", resources={"CPU": 9}, timeout_s=0.5)
        wrong: list[dict[str, Any]] = [{"storage": "here"}, {"placement": "near"}, {"name": "a/b"}, {"port": -1}]
        wrong += [{"resources": {"CPU": -1}}, {"resources": {"GPU": "1"}}, {"lifetime": "long"}]
        for settings in wrong:
            with pytest.raises(InvalidRequestError):
                tdserve_ray.start(1, **{"storage": str(storage), "name": "other", **settings})
        with pytest.raises(tdserve.ConnectError, match="no servers of this name"):
            tdserve.connect("ray://other")


def _read_all(table: Any) -> list[int] | None:
    """Returns the numbers of all rows; None while a shard is left out."""
    numbers: list[int] = table[:]["number"].tolist()
    return None if table.is_degraded else numbers


def _sample(client: tdserve.ClusterClient, table: tdserve.ReplayHandle) -> dict[str, Any]:
    return {"numbers": table.sample(50)["number"].tolist(), "lost": client.members.lost}


@pytest.mark.full
def test_servers_when_a_node_is_killed_under_load_then_no_acknowledged_row_is_lost(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**QUICK, "num_cpus": 0})
    try:
        nodes = [cluster.add_node(**QUICK) for _ in range(3)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        servers = tdserve_ray.start(3, storage=tmp_path, placement="STRICT_SPREAD", lifetime="detached")
        with servers.client() as client:
            table = client.create_replay("table", rows(1)[0], 300_000, shards="all")
            waiting = client.create_replay("waiting", rows(1)[0], 300_000, shards="all", on_shard_loss="wait")
            for writer in range(1, 30):
                table.extend(rows(1, -writer), writer=writer)
            loads = [
                Writer(lambda number: table.extend(rows(1, number), writer=number % 7)),
                Writer(lambda number: waiting.extend(rows(1, number), writer=number % 7, timeout_s=100.0)),
                Writer(lambda _: table.sample(8)),
            ]
            cluster.add_node(**QUICK)  # in place of the one that is lost
            for load in loads:
                load.goes_on()
            cluster.remove_node(nodes[1], allow_graceful=False)
            for load in loads:
                load.goes_on()
            wait_for(lambda: not table.is_degraded and len(table), "the return of all shards", timeout_s=60.0)
            stored, waited, _ = [load.end() for load in loads]
            wait_for(lambda: table.info()["degraded"] == [], "the return of all shards", timeout_s=60.0)
            for handle, numbers in ((table, stored), (waiting, waited)):
                kept = wait_for(partial(_read_all, handle), "a read of all shards", timeout_s=60.0)
                assert set(numbers) <= set(kept)
                assert len(kept) == len(set(kept))
        ray.shutdown()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")  # another job
        with tdserve.connect(servers.address) as client:
            kept = wait_for(partial(_read_all, client.replay("table")), "a read of all shards", timeout_s=60.0)
            assert len(kept) == len(stored) + 29
        tdserve_ray.shutdown()
        with pytest.raises(tdserve.ConnectError):
            tdserve.connect(servers.address)
        with pytest.raises(InvalidRequestError, match="use empty folders"):
            tdserve_ray.start(2, storage=tmp_path)
    finally:
        ray.shutdown()
        cluster.shutdown()
