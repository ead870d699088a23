"""Stores move from server to server while they are used; nothing is lost, doubled or torn, whoever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.errors import (
    InvalidRequestError,
    NotSupportedError,
    StoreExistsError,
    StoreMovedError,
    StoreNotFoundError,
    VersionConflictError,
    WrongStateError,
)
from tdserve.cli.main import main
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tests.errors import raises
from tests.integration.cluster.moving import ROW, choose_other, make_rows, release_only
from tests.integration.cluster.names import name_owned_by
from tests.processes import wait_for

pytestmark = pytest.mark.integration

CHAT = TensorDict({"number": torch.tensor(0), "text": "hello"}, [])


# ---------------------------------------------------------------- content


@pytest.mark.slow
def test_table_when_it_moves_then_its_handle_goes_on(
    user: tdserve.ClusterClient, name: str, servers: list[tdserve.Server]
) -> None:
    table = user.create_replay(name, ROW, 100, sampler=tdserve.Prioritized())
    table.extend(make_rows(0, 60))
    table.extend(make_rows(60, 60))
    sampled = table.sample(8)
    before, inserts = table[:], table.info()["inserts"]
    for _ in range(3):
        target = choose_other(user, name)
        assert user.rebalance(name, target) == target
        assert user.find_server(name) == target
        with servers[target].client() as single:
            assert name in single.stores()
        assert torch.equal(table[:]["number"].sort().values, before["number"].sort().values)
        assert table.info()["inserts"] == inserts
    assert table.update_priority(sampled, torch.full([8], 9.0)) is not False
    assert table.get_priorities(sampled["index"]).tolist() == [9.0] * 8
    assert table.extend(make_rows(120, 1)).tolist() == [20]  # where the ring goes on
    assert len(table.sample(16)) == 16
    assert user.stores().count(name) == 1


def test_values_when_their_table_moves_then_with_it(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, CHAT, 50)
    texts = [f"text {number}" for number in range(20)]
    table.extend(TensorDict({"number": torch.arange(20), "text": NonTensorStack(*texts)}, [20]))
    user.rebalance(name, choose_other(user, name))
    assert table[:]["text"].tolist() == texts
    table.extend(TensorDict({"number": torch.arange(1), "text": NonTensorStack("new")}, [1]))
    assert table[20]["text"] == "new"


def test_queue_when_it_moves_then_taken_rows_come_again_and_acknowledged_ones_do_not(
    user: tdserve.ClusterClient, name: str
) -> None:
    queue = user.create_queue(name, ROW, 50)
    queue.extend(make_rows(0, 6))
    with queue.take(2):
        pass
    held = queue.take(2, ack=False)
    user.rebalance(name, choose_other(user, name))
    with pytest.raises(WrongStateError):
        queue.ack(held)
    with queue.take(4) as rows:
        assert sorted(rows["number"].tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("end", ["give_back", "ack"])
def test_queue_when_it_moves_then_a_lease_of_before_ends_none_of_the_same_number_at_the_other_server(
    user: tdserve.ClusterClient, name: str, end: str
) -> None:
    queue, target = user.create_queue(name, ROW, 50), choose_other(user, name)
    queue.extend(make_rows(0, 2))
    here, there = (user.members.get(server).requests for server in (user.find_server(name), target))
    take_numbers(here, there.newest + 100)
    earlier, number = queue.take(2), here.newest
    user.rebalance(name, target)
    queue.take(2).give_back()  # the first call there asks more
    before, tried = there.newest, queue.take(2)
    num_numbers = there.newest - before
    tried.give_back()
    take_numbers(there, number - num_numbers)
    later = queue.take(2)
    assert there.newest == number
    if end == "give_back":
        earlier.give_back()
    else:
        with pytest.raises(WrongStateError):
            earlier.ack()
    assert queue.info()["num_leased"] == 2
    later.ack()
    assert len(queue) == 0


def take_numbers(numbers: RequestNumbers, last: int) -> None:
    """Takes all numbers of requests up to one."""
    while numbers.newest < last:
        numbers.take_number()


def test_keyed_store_when_it_moves_then_versions_go_on(user: tdserve.ClusterClient, name: str) -> None:
    keyed = user.create_kv(name)
    version = keyed.put("a", {"x": torch.ones(3)})
    user.rebalance(name, choose_other(user, name))
    with pytest.raises(VersionConflictError):
        keyed.put("a", 1, if_version=version + 1)
    assert keyed.put("a", 2, if_version=version) > version
    assert keyed["a"] == 2


def test_weights_when_they_move_then_versions_go_on(user: tdserve.ClusterClient, name: str) -> None:
    for number in range(3):
        last = user.publish(name, TensorDict({"w": torch.full((1000,), float(number))}), metadata={"step": number})
    kept = [version.version for version in user.versions(name)]
    user.rebalance(name, choose_other(user, name))
    latest = user.latest(name)
    assert latest is not None
    assert (latest.version, latest.metadata) == (last, {"step": 2})
    assert bool((latest.data["w"] == 2).all())
    assert [version.version for version in user.versions(name)] == kept
    assert user.publish(name, TensorDict({"w": torch.zeros(1000)})) == last + 1


def test_tensordict_when_it_moves_then_its_handle_goes_on(user: tdserve.ClusterClient, name: str) -> None:
    content = TensorDict({"x": torch.arange(12).view(4, 3), "note": "kept"}, [4])
    store = user.memmap(content, name)
    user.rebalance(name, choose_other(user, name))
    store.set_at_("x", torch.full((3,), 7), 1)
    assert store["x"].tolist() == [[0, 1, 2], [7, 7, 7], [6, 7, 8], [9, 10, 11]]
    assert user.from_remote_init(name)["note"] == "kept"
    assert user.send(content, name) > 0
    assert store["x"].tolist() == content["x"].tolist()


@pytest.mark.slow
def test_part_when_it_moves_then_the_whole_goes_on(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, ROW, 1000, shards=2, shard_by="number")
    table.extend(make_rows(0, 100))
    old = table.info()["servers"]
    free = next(server for server in range(3) if server not in old)
    assert user.rebalance(f"{name}#1", free) == free
    table.extend(make_rows(100, 100))
    opened = user.replay(name)
    assert opened.info()["servers"] == table.info()["servers"] == [old[0], free]
    for handle in (table, opened):
        assert sorted(handle[:]["number"].tolist()) == list(range(200))
    with pytest.raises(WrongStateError, match="another part"):
        user.rebalance(f"{name}#0", free)
    with pytest.raises(InvalidRequestError, match="parts"):
        user.rebalance(name, free)
    user.delete(name)
    assert not [each for each in user.stores() if each.startswith(name)]
    again = user.create_replay(name, ROW, 1000, shards=2, shard_by="number")
    again.extend(make_rows(0, 50))
    assert sorted(user.replay(name)[:]["number"].tolist()) == list(range(50))


@pytest.mark.slow
def test_part_when_its_mover_was_lost_then_found_and_the_record_mended(
    user: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = user.create_replay(name, ROW, 1000, shards=2, shard_by="number")
    table.extend(make_rows(0, 100))
    old = table.info()["servers"]
    free = next(server for server in range(3) if server not in old)
    with tdserve.connect(address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        release_only(mover, f"{name}#1", free, move=f"{4:032x}")
    for handle in (table, user.replay(name)):
        assert sorted(handle[:]["number"].tolist()) == list(range(100))
    with pytest.raises(WrongStateError, match="another part"):
        user.rebalance(f"{name}#0", free)
    assert user.rebalance(f"{name}#0", old[1]) == old[1]  # where the record had the other part
    with tdserve.connect(address) as other:
        assert other.replay(name).info()["servers"] == [old[1], free]
    for handle in (table, user.replay(name)):
        assert sorted(handle[:]["number"].tolist()) == list(range(100))


@pytest.mark.slow
def test_parts_when_all_of_them_move_then_open_handles_and_draws_go_on(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, ROW, 1000, shards=2, shard_by="number")
    table.extend(make_rows(0, 100))
    first = table.sample(10, rank=0, world_size=2, step=0)["number"].tolist()
    old = table.info()["servers"]
    free = next(server for server in range(3) if server not in old)
    with pytest.raises(InvalidRequestError, match="moves with"):
        user.rebalance(f"{name}#splits", free)
    with tdserve.connect(user.address) as other:
        assert isinstance(other, tdserve.ClusterClient)
        assert other.rebalance(f"{name}#0", free) == free
        assert other.rebalance(f"{name}#1", old[0]) == old[0]
        assert other.replay(name).info()["servers"] == [free, old[0]]
    assert sorted(table[:]["number"].tolist()) == list(range(100))
    assert table.sample(10, rank=0, world_size=2, step=0)["number"].tolist() == first
    second = user.replay(name).sample(10, rank=1, world_size=2, step=0)["number"].tolist()
    assert not set(first) & set(second)


# ---------------------------------------------------------------- places


@pytest.mark.slow
def test_store_when_it_has_moved_then_deleted_and_made_anew(client: tdserve.ClusterClient, name: str) -> None:
    for _ in range(2):
        client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
        assert client.find_server(name) == client.directory.get_owner(name)
        client.rebalance(name, choose_other(client, name))
        client.rebalance(name, choose_other(client, name))
        client.delete(name)
        assert name not in client
        assert name not in client.stores()


@pytest.mark.slow
def test_store_when_it_comes_home_then_nothing_is_in_between(
    client: tdserve.ClusterClient, address: str, name: str
) -> None:
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    home = client.find_server(name)
    for server in (1, 2, 0, 2, 1):
        client.rebalance(name, server)
    assert client.rebalance(name) == home
    with tdserve.connect(address) as other:
        assert isinstance(other, tdserve.ClusterClient)
        assert other[name]["x"].tolist() == [0, 1, 2]
        assert list(other.members.used) == [home]


@pytest.mark.slow
def test_batches_when_their_table_moves_then_go_on_at_its_new_server(client: tdserve.ClusterClient, name: str) -> None:
    table = client.create_replay(name, TensorDict({"x": torch.zeros((), dtype=torch.int64)}, []), 100)
    table.extend(TensorDict({"x": torch.arange(100)}, [100]))
    with table.batches(16, prefetch=2) as batches:
        for _ in range(3):
            for _ in range(5):
                assert len(next(batches)) == 16
            client.rebalance(name, choose_other(client, name))
        table.extend(TensorDict({"x": torch.full((100,), 7)}, [100]))
        wait_for(lambda: set(next(batches)["x"].tolist()) == {7}, "rows that were written after the last move")


def test_plain_client_when_a_store_has_moved_then_is_shown_where(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    before = client.find_server(name)
    with servers[before].client() as single:
        store = single[name]
        after = client.rebalance(name, choose_other(client, name))
        for ask in (lambda: store.get("x"), lambda: single[name], lambda: single.delete(name)):
            with pytest.raises(StoreMovedError, match=f"server {after}"):
                ask()


@pytest.mark.slow
def test_server_when_drained_then_has_nothing_but_records(servers: list[tdserve.Server]) -> None:
    drained = 1
    names = [name_owned_by(drained, 3) for _ in range(4)]
    with tdserve.connect(",".join(server.address for server in servers)) as client:
        assert isinstance(client, tdserve.ClusterClient)
        for number, name in enumerate(names):
            client.memmap(TensorDict({"x": torch.full((3,), number)}, [3]), name)
        moved = client.drain(drained)
        assert set(names) <= set(moved)
        assert client.members.get(drained).stores() == []
        for number, name in enumerate(names):
            assert client[name]["x"].tolist() == [number] * 3
            client.delete(name)


@pytest.mark.slow
def test_drain_when_every_server_has_a_part_then_the_error_names_all_that_stay(
    servers: list[tdserve.Server],
) -> None:
    names = [name_owned_by(0, 3) for _ in range(2)]
    like = TensorDict({"x": torch.zeros(())}, [])
    with tdserve.connect(",".join(server.address for server in servers)) as client:
        assert isinstance(client, tdserve.ClusterClient)
        for name in names:
            client.create_replay(name, like=like, capacity=9, shards=3)
        with pytest.raises(WrongStateError, match="every server has a part of") as caught:
            client.drain(1)
        left = str(caught.value).partition("; still on server 1: ")[2]
        assert sorted(left.split(", ")) == sorted(repr(name) for name in client.list_stores_at(1))
        for name in names:
            client.delete(name)


@pytest.mark.slow
def test_rebalance_when_there_is_no_such_store_then_is_refused(client: tdserve.ClusterClient, name: str) -> None:
    for server in (None, *range(3)):
        with pytest.raises(StoreNotFoundError, match=name):
            client.rebalance(name, server)


@pytest.mark.slow
def test_command_when_stores_move_then_prints_where(
    address: str, client: tdserve.ClusterClient, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    home, target = client.find_server(name), choose_other(client, name)
    assert main(["rebalance", name, "--to", str(target), "--dry-run", "--address", address]) == 0
    assert capsys.readouterr().out == f"{name}: would move from server {home} to {target}\n"
    assert main(["rebalance", name, "--to", str(target), "--address", address]) == 0
    assert capsys.readouterr().out == f"{name}: moved from server {home} to {target}\n"
    assert main(["rebalance", name, "--address", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": name, "from": target, "to": home}]
    assert client[name]["x"].tolist() == [0, 1, 2]
    assert main(["rebalance", "--drain", str(home), "--address", address]) == 0
    assert f"{name}: moved from server {home}" in capsys.readouterr().out
    assert main(["rebalance", "nothing", "--address", address]) == 4
    client.create_kv("everywhere", shards="all")
    assert main(["rebalance", "--drain", str(client.find_server(name)), "--dry-run", "--address", address]) == 6
    assert f"{name}: would move" in capsys.readouterr().out
    client.delete("everywhere")
    for wrong in (["rebalance", name, "--drain", "0"], ["rebalance"], ["rebalance", "--drain", "0", "--to", "1"]):
        assert main([*wrong, "--address", address]) == 2
    assert main(["rebalance", name, "--address", address.partition(",")[0]]) == 2


# ---------------------------------------------------------------- refusals


def test_move_when_the_target_has_such_a_store_then_nothing_moves(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    target = choose_other(client, name)
    with servers[target].client() as single:
        single.memmap(TensorDict({"x": torch.zeros(1)}, [1]), name)
        with pytest.raises(StoreExistsError):
            client.rebalance(name, target)
        single.delete(name)
    assert client[name]["x"].tolist() == [0, 1, 2]


def test_move_when_the_store_cannot_then_refused_with_the_reason(
    client: tdserve.ClusterClient, name: str, tmp_path: Path
) -> None:
    TensorDict({"x": torch.arange(3)}, [3]).memmap(tmp_path / "folder")
    client.adopt(tmp_path / "folder", name)
    with pytest.raises(NotSupportedError, match="folder"):
        client.rebalance(name, choose_other(client, name))
    with raises(InvalidRequestError, argument="server"):
        client.rebalance(name, 3)
