"""Checkpoints of several servers, brought back to as many others, or more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, StoreExistsError, StoreNotFoundError, WrongStateError
from tdserve.cli.main import main
from tdserve.client.moves.server_checkpoints import list_checkpoints
from tests.errors import raises
from tests.integration.cluster.moving import ROW, choose_other, make_rows
from tests.integration.cluster.names import name_owned_by, next_name

pytestmark = pytest.mark.integration

CONTENT = TensorDict({"x": torch.arange(3)}, [3])


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[tdserve.Server]]:
    """Three empty servers."""
    with ExitStack() as stack:
        yield [stack.enter_context(tdserve.Server(tmp_path / f"other{number}").start()) for number in range(3)]


@pytest.mark.slow
def test_stores_when_restored_to_other_servers_then_shared_ones_too(
    client: tdserve.ClusterClient, others: list[tdserve.Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("ckpt-table", "ckpt-queue", "ckpt-values", "ckpt-content")
    table = client.create_replay(names[0], ROW, 300, shards="all")
    queue = client.create_queue(names[1], ROW, max_size=60, shards=2)
    values = client.create_kv(names[2], shards="all")
    for writer in range(1, 6):
        table.extend(make_rows(10 * writer, 10), writer=writer)
    queue.extend(make_rows(0, 8))
    values.put(["a", "b", "c"], [{"n": each} for each in range(3)])
    client.memmap(TensorDict({"x": torch.arange(4)}, [4]), names[3])
    try:
        made = client.checkpoint(tmp_path / "place")
        assert len(made) == 3
        assert main(["checkpoint", str(tmp_path / "place"), "--list", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [(each["server"], each["id"]) for each in listed] == [(n, each.id) for n, each in enumerate(made)]
        with tdserve.connect(",".join(server.address for server in others)) as restored:
            assert isinstance(restored, tdserve.ClusterClient)
            restored.restore(tmp_path / "place", names=names)
            assert sorted(restored.replay(names[0])[:]["number"].tolist()) == list(range(10, 60))
            assert restored.replay(names[0]).placement == table.placement
            with restored.queue(names[1]).take(8) as taken:
                assert sorted(taken["number"].tolist()) == list(range(8))
            assert [restored.kv(names[2])[key]["n"] for key in "abc"] == [0, 1, 2]
            assert restored[names[3]]["x"].tolist() == [0, 1, 2, 3]
            assert set(restored.stores()) == set(names)
            table.extend(make_rows(60, 10), writer=1)
            client.checkpoint(tmp_path / "place")
            copies = restored.restore(tmp_path / "place", names=names[0], checkpoint=made[1].id, prefix="old-")
            assert sorted(restored.replay(f"old-{names[0]}")[:]["number"].tolist()) == list(range(10, 60))
            restored.restore(tmp_path / "place", names=[names[0]], prefix="new-")
            assert sorted(restored.replay(f"new-{names[0]}")[:]["number"].tolist()) == list(range(10, 70))
            assert copies == [f"old-{names[0]}"]
            before = restored.stores()
            with pytest.raises(StoreExistsError, match="ckpt-"):
                restored.restore(tmp_path / "place")
            with pytest.raises(StoreNotFoundError, match="missing"):
                restored.restore(tmp_path / "place", names=[names[1], "missing"], prefix="more-")
            with pytest.raises(InvalidRequestError, match=made[0].id):
                restored.restore(tmp_path / "place", checkpoint="20000101-000000-000000-abcdefab", prefix="more-")
            assert restored.stores() == before
        with tdserve.connect(",".join(server.address for server in others[:2])) as two:
            assert isinstance(two, tdserve.ClusterClient)
            with pytest.raises(InvalidRequestError, match="more servers than the 2 given"):
                two.restore(tmp_path / "place")
        with others[0].client() as one, pytest.raises(InvalidRequestError, match="connect to all servers"):
            one.restore(tmp_path / "place")
    finally:
        for name in names:
            client.delete(name)


def test_store_when_it_has_moved_since_then_its_name_is_taken(client: tdserve.ClusterClient, tmp_path: Path) -> None:
    name = next_name()
    store = client.memmap(CONTENT, name)
    try:
        client.checkpoint(tmp_path / "place")
        client.rebalance(name, choose_other(client, name))
        with raises(StoreExistsError, name=name):
            client.restore(tmp_path / "place", names=[name])
        assert sum(name in client.members.get(server).stores() for server in range(3)) == 1
        assert store["x"].tolist() == CONTENT["x"].tolist()
    finally:
        client.delete(name)


@pytest.mark.slow
def test_stores_when_restored_to_more_servers_then_found_and_their_names_taken(
    others: list[tdserve.Server], tmp_path: Path
) -> None:
    names = [next_name() for _ in range(6)]
    shared = next_name()
    with tdserve.connect(",".join(server.address for server in others[:2])) as two:
        for name in names:
            two.memmap(CONTENT, name)
        two.create_replay(shared, ROW, 300, shards="all").extend(make_rows(0, 20))
        two.checkpoint(tmp_path / "place")
        for name in (*names, shared):
            two.delete(name)
    with tdserve.connect(",".join(server.address for server in others)) as three:
        assert three.restore(tmp_path / "place", names=[*names, shared]) == sorted([*names, shared])
        for name in names:
            assert three[name]["x"].tolist() == CONTENT["x"].tolist()
            with pytest.raises(StoreExistsError):
                three.memmap(CONTENT, name)
        assert sorted(three.replay(shared)[:]["number"].tolist()) == list(range(20))
        for name in (*names, shared):
            three.delete(name)


@pytest.mark.slow
def test_table_when_restored_without_its_policy_on_its_server_then_it_follows_the_copy_on_another(
    client: tdserve.ClusterClient, others: list[tdserve.Server], tmp_path: Path
) -> None:
    policy = next_name()
    client.publish(policy, ROW)
    name = name_owned_by(choose_other(client, policy), 3)
    table = client.create_replay(name, ROW, 100, policy=policy)
    table.extend(make_rows(0, 4))
    try:
        client.checkpoint(tmp_path / "place")
        with tdserve.connect(",".join(server.address for server in others)) as restored:
            restored.restore(tmp_path / "place", names=[name, policy])
            copy = restored.replay(name)
            lagging = restored.publish(policy, ROW) - 1
            copy.extend(make_rows(4, 4))
            assert set(copy.sample(64, max_lag=0)["number"].tolist()) <= {4, 5, 6, 7}
            assert 0 in copy.sample(256, max_lag=lagging)["number"].tolist()
    finally:
        client.delete(name)
        client.delete(policy)


@pytest.mark.slow
def test_stores_when_some_had_moved_before_then_they_come_back_with_the_others(
    client: tdserve.ClusterClient, others: list[tdserve.Server], tmp_path: Path
) -> None:
    moved, shared = next_name(), next_name()
    client.publish(moved, ROW)
    client.create_replay(shared, ROW, 300, shards=2).extend(make_rows(0, 20))
    try:
        client.rebalance(moved, choose_other(client, moved))
        free = next(number for number in range(3) if number not in client.replay(shared).placement.servers)
        client.rebalance(f"{shared}#0", free)
        made = client.checkpoint(tmp_path / "place")
        assert sum(moved in [store.name for store in each.stores] for each in made) == 1
        assert all(each.left_out == [] for each in made)
        assert len(repr(made[0].stores)) < 500 * (1 + len(made[0].stores))
        wanted = [moved, shared]
        assert client.restore(tmp_path / "place", names=wanted, prefix="again-")
        with tdserve.connect(",".join(server.address for server in others)) as restored:
            restored.restore(tmp_path / "place", names=wanted)
            for user, prefix in ((client, "again-"), (restored, "")):
                assert [version.version for version in user.versions(prefix + moved)] == [1]
                assert sorted(user.replay(prefix + shared)[:]["number"].tolist()) == list(range(20))
    finally:
        for name in (moved, shared, f"again-{moved}", f"again-{shared}"):
            if name in client:
                client.delete(name)


@pytest.mark.slow
def test_checkpoint_when_a_store_moves_all_the_time_then_in_it_once_or_refused(
    client: tdserve.ClusterClient, others: list[tdserve.Server], address: str, tmp_path: Path
) -> None:
    names = [next_name() for _ in range(3)]
    for number, name in enumerate(names):
        client.memmap(TensorDict({"x": torch.full((4,), number)}, [4]), name)
    ended = Event()

    def move() -> None:
        with tdserve.connect(address) as mover:
            assert isinstance(mover, tdserve.ClusterClient)
            while not ended.is_set():
                for name in names:
                    mover.rebalance(name, (mover.find_server(name) + 1) % 3)

    moving = client.run_later(move)
    num_made = 0
    try:
        while num_made < 4:
            with suppress(WrongStateError):
                made = client.checkpoint(tmp_path / "place", keep=2)
                num_made += 1
                assert {*names} <= {store.name for each in made for store in each.stores}
    finally:
        ended.set()
        moving.result(timeout=60.0)
    for server in range(3):
        assert len(list_checkpoints(tmp_path / "place" / f"server-{server}")) == 2
    with tdserve.connect(",".join(server.address for server in others)) as restored:
        assert sorted(restored.restore(tmp_path / "place", names=names)) == sorted(names)
        for number, name in enumerate(names):
            assert restored.from_remote_init(name)["x"].tolist() == [number] * 4
            restored.delete(name)
            assert name not in restored
    for name in names:
        client.delete(name)


@pytest.mark.slow
def test_restore_when_two_checkpoints_have_a_store_then_the_later_one(
    client: tdserve.ClusterClient,
    servers: list[tdserve.Server],
    others: list[tdserve.Server],
    tmp_path: Path,
) -> None:
    name = next_name()
    client.memmap(TensorDict({"x": torch.zeros(4)}, [4]), name)
    for number in (1, 0, 2):  # as servers do by schedule
        if number != 2:
            client.rebalance(name, number)
        client[name].set_at_("x", torch.full((4,), float(number)), slice(0, 4))
        with servers[number].client() as alone:
            alone.checkpoint(tmp_path / "place" / f"server-{number}")
    client.delete(name)
    with tdserve.connect(",".join(server.address for server in others)) as restored:
        assert restored.restore(tmp_path / "place", names=[name]) == [name]
        assert restored.from_remote_init(name)["x"].tolist() == [0.0] * 4
        restored.delete(name)
        assert name not in restored


@pytest.mark.slow
def test_checkpoint_when_one_server_cannot_write_its_own_then_none_stays(
    client: tdserve.ClusterClient, name: str, tmp_path: Path
) -> None:
    client.memmap(CONTENT, name)
    place = tmp_path / "place"
    whole = client.checkpoint(place)
    blocked = place / "server-1"
    blocked.rename(tmp_path / "kept")
    blocked.write_text("no folder")
    with pytest.raises(tdserve.TDServeError):
        client.checkpoint(place)
    blocked.unlink()
    (tmp_path / "kept").rename(blocked)
    for server in range(3):
        assert [each.id for each in list_checkpoints(place / f"server-{server}")] == [whole[server].id]
    client.delete(name)
    assert client.restore(place, names=[name]) == [name]
    client.delete(name)
