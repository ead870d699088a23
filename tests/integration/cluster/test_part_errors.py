"""Errors of shared stores name the store, not the part of a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    CorruptDataError,
    DamagedRowError,
    DeadlineExceededError,
    InvalidRequestError,
    KeyNotFoundError,
    NotSupportedError,
    SelectionError,
    SpecMismatchError,
    StoreNotFoundError,
    TDServeError,
    TooLargeError,
    VersionConflictError,
    WrongStateError,
)
from tdserve.client.cluster.servers.part_errors import convert_part_errors
from tdserve.rules.placement import hash_to_shard
from tests.integration.cluster.losing import fill_each, rows as numbered_rows
from tests.integration.cluster.names import next_name

pytestmark = pytest.mark.integration


def rows(num_rows: int) -> TensorDict:
    """Returns some rows."""
    return TensorDict({"x": torch.arange(num_rows)}, [num_rows])


def key_of_shard(shard: int) -> str:
    """Returns a key that one of three servers has."""
    return next(key for key in map(str, range(1000)) if hash_to_shard(key.encode(), 3) == shard)


def get_text_of(act: Callable[[], Any], kind: type[TDServeError], name: str) -> str:
    """Returns the text of an error. The error must have this class, and name the store but no part of it."""
    with pytest.raises(kind) as caught:
        act()
    assert repr(name) in str(caught.value)
    assert f"{name}#" not in str(caught.value)
    return str(caught.value)


def test_table_when_a_call_is_refused_then_the_error_names_the_table(user: tdserve.ClusterClient, name: str) -> None:
    table = user.create_replay(name, rows(1)[0], 300, shards="all")
    wrong = TensorDict({"y": torch.arange(3)}, [3])
    assert "'x'" in get_text_of(lambda: table.extend(wrong), SpecMismatchError, name)
    table.extend(rows(3))
    assert "shard 1" in get_text_of(lambda: table[199], SelectionError, name)
    get_text_of(lambda: table.sample(3, group_by="y"), KeyNotFoundError, name)
    get_text_of(lambda: table.set_at_("y", torch.zeros(1), [0]), KeyNotFoundError, name)


@pytest.mark.slow
def test_table_when_a_row_does_not_fit_then_the_error_has_its_number_in_the_table(
    user: tdserve.ClusterClient, name: str
) -> None:
    table = user.create_replay(name, rows(1)[0], 30, shards="all", sampler=tdserve.Prioritized())
    for shard in range(3):
        table.extend(rows(8), writer=next(n for n in range(1, 1000) if table.choose_shard(n) == shard))
    read, generations = table.get_with_generations([16, 17])
    gone = {"index": torch.tensor([16, 17]), "generation": generations}
    table.delete([17])
    calls: list[Callable[[], Any]] = [
        lambda: table[17],
        lambda: table[[3, 17, 25]],
        lambda: table.get_at("x", [17]),
        lambda: table.get_with_generations([17]),
        lambda: table.set_at_("x", torch.tensor(0), [2, 17]),
        lambda: table.set_at_("x", read["x"], TensorDict(gone, [2])),
        lambda: table.delete([17]),
        lambda: table.update_priority([17], 1.0),
        lambda: table.get_priorities([17]),
    ]
    for call in calls:
        with pytest.raises(SelectionError) as caught:
            call()
        assert caught.value.selection == "17"
        assert str(caught.value).startswith(f"index 17 does not fit: this row of table {name!r} ")
    parted: list[tuple[Callable[[], Any], tuple[int, ...]]] = [
        (lambda: table.set_at_("x", torch.tensor(0), [3, 17, 25]), (0, 2)),
        (lambda: table.delete([17, 25]), (2,)),
        (lambda: table.delete([17, 16]), ()),
        (lambda: table[[3, 17, 25]], ()),
    ]
    for call, shards_done in parted:
        with pytest.raises(SelectionError) as caught:
            call()
        assert caught.value.shards_done == shards_done
    for call in (lambda: table[30], lambda: table.set_at_("x", 0, [4, 30]), lambda: table.delete([30])):
        assert "index 30 does not fit" in get_text_of(call, SelectionError, name)


def test_errors_when_a_part_names_rows_of_its_own_then_numbered_as_in_the_store() -> None:
    def convert(error: TDServeError) -> TDServeError:
        with pytest.raises(type(error)) as caught, convert_part_errors("t", lambda shard: 100 * shard):
            raise error
        return caught.value

    dead = convert(SelectionError(selection="7", reason="this row of table 't#2' is not live now"))
    assert dead.fields == {"selection": "207", "reason": "this row of table 't' is not live now"}
    assert convert(dead).fields == dead.fields
    damaged = convert(DamagedRowError(store="t#1", row=5, expected="1", actual="2"))
    assert (damaged.store, damaged.row) == ("t", 105)
    assert convert(damaged).fields == damaged.fields
    lost = convert(CorruptDataError(path="store 't#1', rows 3, 14, ...", expected="rows", actual="none"))
    assert lost.path == "shard 1 of store 't', rows 103, 114, ..."
    assert convert(lost).fields == lost.fields
    others = (
        SelectionError(selection="7", reason="this row of table 'at#2' is not live now"),
        DamagedRowError(store="t", row=5, expected="1", actual="2"),
    )
    for other in others:
        assert convert(other) is other


@pytest.mark.slow
@pytest.mark.parametrize("is_dataset", [False, True])
def test_damaged_row_when_it_is_of_a_shared_store_then_the_error_has_its_number_in_the_store(
    user: tdserve.ClusterClient, servers: list[tdserve.Server], name: str, is_dataset: bool
) -> None:
    store: Any
    if is_dataset:
        store, damaged = user.memmap(rows(30), name, shards="all", checksum=True, durability="disk"), 14
        store[15] = rows(16)[15]  # the answer waits for a sync
    else:
        store = user.create_replay(name, rows(1)[0], 30, shards="all", checksum=True, durability="disk")
        writer = next(n for n in range(1, 1000) if store.choose_shard(n) == 1)
        damaged = int(store.extend(rows(10), writer=writer)[4])
    server = servers[store.placement.servers[1]]
    assert store[damaged]["x"] >= 0
    with open(Path(server.config.root, "stores", f"{name}#1", "rows", "x.memmap"), "r+b") as file:
        file.seek(8 * 4)
        file.write(b"\xff")
    with pytest.raises(DamagedRowError) as caught:
        store[damaged]
    assert (caught.value.store, caught.value.row) == (name, damaged)
    if not is_dataset:
        with pytest.raises(DamagedRowError) as caught:
            store.sample(1000)
        assert (caught.value.store, caught.value.row) == (name, damaged)


@pytest.mark.slow
def test_queue_when_rows_never_fit_then_the_error_names_the_queue(user: tdserve.ClusterClient, name: str) -> None:
    queue = user.create_queue(name, rows(1)[0], 30, shards="all")
    get_text_of(lambda: queue.extend(rows(40)), TooLargeError, name)


def test_keyed_store_when_a_key_is_missing_then_the_error_names_the_store(
    user: tdserve.ClusterClient, name: str
) -> None:
    kv = user.create_kv(name, shards="all")
    assert f"client.kv({name!r}).keys()" in get_text_of(lambda: kv["a"], KeyNotFoundError, name)
    get_text_of(lambda: kv.get(["a", "b", "c", "d"]), KeyNotFoundError, name)
    get_text_of(lambda: kv.pop("a"), KeyNotFoundError, name)
    get_text_of(lambda: kv.put("a", {"n": 1}, if_version=3), VersionConflictError, name)


@pytest.mark.slow
def test_dataset_when_a_key_is_missing_then_the_error_names_the_dataset(user: tdserve.ClusterClient, name: str) -> None:
    frames = user.memmap(rows(30), name, shards="all")
    get_text_of(lambda: frames["y"], KeyNotFoundError, name)
    get_text_of(lambda: frames.set_at_("x", torch.zeros(2, 2), slice(0, 2)), SpecMismatchError, name)


@pytest.mark.slow
def test_table_when_it_was_deleted_then_the_error_names_it(user: tdserve.ClusterClient) -> None:
    name = next_name()
    table = user.create_replay(name, rows(1)[0], 300, shards="all")
    table.extend(rows(3))
    user.delete(name)
    get_text_of(lambda: table.sample(3), StoreNotFoundError, name)
    get_text_of(lambda: table.extend(rows(3)), StoreNotFoundError, name)
    get_text_of(lambda: len(table), StoreNotFoundError, name)


@pytest.mark.slow
def test_record_when_a_client_of_one_server_deletes_it_then_refused_and_nothing_is_lost(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 30, shards="all")
    table.extend(rows(4))
    for server in servers:
        with server.client() as single, pytest.raises(NotSupportedError, match=f"'{name}'.*connect to all"):
            single.delete(name)
    assert len(client.replay(name)) == 4
    client.delete(name)
    assert name not in client
    for server in servers:
        with server.client() as single:
            assert not [each for each in single.stores() if each.startswith(name)]


@pytest.mark.slow
def test_restore_when_one_part_is_named_then_refused_and_the_whole_comes_back(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str, tmp_path: Path
) -> None:
    table = client.create_replay(name, rows(1)[0], 30, shards="all")
    table.extend(rows(4))
    client.checkpoint(tmp_path)
    with pytest.raises(InvalidRequestError, match=f"'{name}#0' is a part of '{name}'"):
        client.restore(tmp_path, names=[f"{name}#0"], prefix="copy-")
    with servers[0].client() as single, pytest.raises(InvalidRequestError, match=f"a part of '{name}'"):
        single.restore(tmp_path / "server-0", names=[f"{name}#0"], prefix="copy-")
    assert not [each for each in client.stores() if each.startswith(f"copy-{name}")]
    client.restore(tmp_path, names=[name], prefix="copy-")
    assert len(client.replay(f"copy-{name}")) == 4
    client.delete(f"copy-{name}")


@pytest.mark.slow
def test_put_when_one_entry_has_another_version_then_the_error_names_what_other_servers_have_put(
    user: tdserve.ClusterClient, name: str
) -> None:
    kv = user.create_kv(name, shards="all")
    first, second, third = (key_of_shard(shard) for shard in range(3))
    kv.put(first, 1)
    text = get_text_of(lambda: kv.put([first, second, third], [9, 9, 9], if_version=0), VersionConflictError, name)
    assert repr(first) in text
    assert text.endswith(f"{second!r}, {third!r} were put, at other servers")
    assert kv.get([first, second, third]) == [1, 9, 9]


@pytest.mark.slow
def test_pop_when_an_entry_of_another_server_is_missing_then_nothing_is_deleted(
    user: tdserve.ClusterClient, name: str
) -> None:
    kv = user.create_kv(name, shards="all")
    first, second = key_of_shard(0), key_of_shard(1)
    kv.put(first, 1)
    for timeout_s, kind in ((0, KeyNotFoundError), (0.2, DeadlineExceededError)):
        with pytest.raises(kind):
            kv.pop([first, second], timeout_s=timeout_s)
        assert kv[first] == 1
    kv.put(second, 2)
    assert kv.pop([second, first]) == [2, 1]


@pytest.mark.slow
def test_ack_when_rows_of_one_server_are_not_held_then_the_error_names_those_that_were_acknowledged(
    user: tdserve.ClusterClient, name: str
) -> None:
    queue = user.create_queue(name, numbered_rows(1)[0], 30, shards="all")
    fill_each(queue)
    taken = queue.take(30, ack=False)
    is_first = taken["index"] < queue.part_capacity
    queue.ack(taken[is_first])
    with pytest.raises(WrongStateError, match="20 of these 30 rows were acknowledged"):
        queue.ack(taken)
    assert len(queue) == 0
