"""Tables follow a policy whose weights are on another server: lags count from the newest version that their clients
know."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError
from tests.integration.cluster.losing import join_addresses
from tests.integration.cluster.moving import ROW, choose_other, make_rows
from tests.integration.cluster.names import name_owned_by, next_name
from tests.integration.crashing import Crashing
from tests.processes import wait_for

pytestmark = pytest.mark.integration

WEIGHTS = ROW.clone()


@pytest.fixture
def policy(user: tdserve.ClusterClient, name: str) -> str:
    """Weights of two versions."""
    policy = f"policy-{name}"
    for _ in range(2):
        user.publish(policy, WEIGHTS)
    return policy


def name_elsewhere(user: tdserve.ClusterClient, policy: str) -> str:
    """Returns a name whose store is on another server than the policy."""
    return name_owned_by(choose_other(user, policy), len(user.members))


def draw_versions(table: Any, max_lag: int, num_rows: int = 64) -> set[int]:
    """Returns the policy versions of the rows in a large sample."""
    return set(table.sample(num_rows, max_lag=max_lag, timeout_s=20.0)["policy_version"].tolist())


def test_table_when_its_policy_is_on_another_server_then_rows_have_its_versions_and_lags(
    user: tdserve.ClusterClient, policy: str
) -> None:
    table = user.create_replay(name_elsewhere(user, policy), ROW, 100, policy=policy)
    assert user.find_server(table.name) != user.find_server(policy)
    table.extend(make_rows(0, 4))
    table.extend(make_rows(4, 4), policy_version=1)
    assert user.publish(policy, WEIGHTS) == 3
    table.extend(make_rows(8, 4))
    assert draw_versions(table, 0) == {3}
    assert draw_versions(table, 1) == {2, 3}
    assert draw_versions(table, 2) == {1, 2, 3}
    assert table.info()["newest_policy_version"] == 3
    with pytest.raises(InvalidRequestError, match="newest"):
        table.extend(make_rows(12, 1), policy_version=4)
    future = user.publish(policy, WEIGHTS, return_early=True)
    assert future.result() == 4
    table.extend(make_rows(12, 1), policy_version=4)


@pytest.mark.slow
def test_shards_when_they_follow_a_policy_then_all_of_them_count_its_versions(
    user: tdserve.ClusterClient, name: str, policy: str
) -> None:
    table = user.create_replay(name, ROW, 90, policy=policy, shards="all", shard_by="number")
    table.extend(make_rows(0, 30))
    user.publish(policy, WEIGHTS)
    table.extend(make_rows(30, 30))
    new = table.sample(64, max_lag=0)
    assert set(new["policy_version"].tolist()) == {3}
    assert int(new["number"].min()) >= 30
    assert draw_versions(table, 1, num_rows=256) == {2, 3}


@pytest.mark.slow
def test_queue_when_another_client_publishes_then_a_waiting_reader_gets_only_new_rows(
    user: tdserve.ClusterClient, servers: list[tdserve.Server], policy: str
) -> None:
    queue = user.create_queue(name_elsewhere(user, policy), ROW, 20, policy=policy)
    queue.extend(make_rows(0, 4))
    with tdserve.connect(user.address, transport="gloo") as learner:
        for _ in range(3):
            learner.publish(policy, WEIGHTS)

        def take_nothing() -> bool:
            try:
                with queue.take(1, max_lag=2, timeout_s=0.05) as rows:
                    queue.extend(rows.select("number", "body"), policy_version=2)  # not heard of yet
                return False
            except DeadlineExceededError:
                return True

        wait_for(take_nothing, "the news of a version that another client has published")
        assert queue.info()["num_discarded"] >= 4
        queue.extend(make_rows(4, 2))
        with queue.take(2, max_lag=0) as rows:
            assert rows["number"].tolist() == [4, 5]
            assert rows["policy_version"].tolist() == [5, 5]


@pytest.mark.slow
def test_policy_when_it_is_deleted_and_published_anew_elsewhere_then_old_rows_are_too_old(
    user: tdserve.ClusterClient, policy: str
) -> None:
    table = user.create_replay(name_elsewhere(user, policy), ROW, 100, policy=policy)
    table.extend(make_rows(0, 4))
    assert draw_versions(table, 0) == {2}
    user.delete(policy)
    with pytest.raises(DeadlineExceededError):
        table.sample(4, max_lag=5, timeout_s=0.2)
    user.publish(policy, WEIGHTS)
    table.extend(make_rows(4, 4))
    assert draw_versions(table, 5) == {3}
    assert set(table.sample(64)["policy_version"].tolist()) == {-1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("moves", ["policy", "table", "both"])
def test_policy_and_table_when_they_move_then_versions_and_lags_stay(
    user: tdserve.ClusterClient, name: str, policy: str, moves: str
) -> None:
    at = user.find_server(policy)
    name = name_owned_by(at, len(user.members))
    table = user.create_replay(name, ROW, 100, policy=policy)
    table.extend(make_rows(0, 4))
    user.publish(policy, WEIGHTS)
    table.extend(make_rows(4, 4))
    for number in range(3):
        for moving in {"policy": [policy], "table": [name], "both": [policy, name]}[moves]:
            user.rebalance(moving, choose_other(user, moving))
        assert draw_versions(table, 0) == {3 + number}
        assert 2 in draw_versions(table, 1 + number)
        user.publish(policy, WEIGHTS)
        table.extend(make_rows(8 + number, 4))
        assert draw_versions(table, 0) == {4 + number}
    assert user.find_server(policy) == at or moves != "table"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_server_when_it_is_drained_then_its_policies_and_their_tables_go_too(
    tmp_path: Path, transport: TransportName
) -> None:
    """On servers of its own: a server cannot be drained while a store of another test has a part on each server."""
    policy = next_name()
    with ExitStack() as stack:
        own = [stack.enter_context(Crashing(tmp_path / f"{number}")) for number in range(2)]
        user = stack.enter_context(tdserve.connect(join_addresses(own), transport=transport))
        assert isinstance(user, tdserve.ClusterClient)
        for _ in range(2):
            user.publish(policy, WEIGHTS)
        at = user.find_server(policy)
        name = name_owned_by(at, len(user.members))
        table = user.create_replay(name, ROW, 100, policy=policy)
        table.extend(make_rows(0, 4))
        assert {*user.drain(at)} == {policy, name}
        assert draw_versions(table, 0) == {2}


@pytest.mark.slow
def test_server_when_it_is_killed_then_its_tables_follow_a_policy_of_another(tmp_path: Path) -> None:
    with Crashing(tmp_path / "0") as first, Crashing(tmp_path / "1") as second:
        crashing = first, second
        with tdserve.connect(",".join(each.server.address for each in crashing)) as user:
            assert isinstance(user, tdserve.ClusterClient)
            policy = next_name()
            for _ in range(2):
                user.publish(policy, WEIGHTS)
            table = user.create_replay(name_elsewhere(user, policy), ROW, 100, policy=policy)
            table.extend(make_rows(0, 4))
            for number in range(2):
                crashing[user.find_server(table.name)].restart()
                user.publish(policy, WEIGHTS)
                table.extend(make_rows(4 + number, 1))
                assert draw_versions(table, 0) == {3 + number}
                assert 2 in draw_versions(table, 1 + number, num_rows=100)
            crashing[user.find_server(table.name)].restart()
            assert set(table[:]["number"].tolist()) == {*range(6)}
            assert 2 in draw_versions(table, 2, num_rows=100)


@pytest.mark.parametrize("shards", [None, 3])
def test_policy_when_it_is_deleted_and_published_anew_then_the_next_sample_and_figures_are_of_the_new_one(
    user: tdserve.ClusterClient, name: str, policy: str, shards: int | None
) -> None:
    table_name = name_elsewhere(user, policy) if shards is None else name
    options: dict[str, Any] = {} if shards is None else {"shards": shards}
    for first in ("sample", "info"):
        table = user.create_replay(f"{table_name}-{first}", ROW, 90, policy=policy, **options)
        table.extend(make_rows(0, 30))
        newest = table.info()["newest_policy_version"]
        user.delete(policy)
        assert user.publish(policy, WEIGHTS) == newest + 1
        if first == "sample":
            assert set(table.sample(64)["policy_version"].tolist()) == {-1}
        assert table.info()["newest_policy_version"] == newest + 1
        assert set(table.sample(64)["policy_version"].tolist()) == {-1}
        user.delete(table.name)
