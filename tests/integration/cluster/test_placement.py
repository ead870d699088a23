"""Each store has one of several servers, and any client finds it."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    ConnectError,
    InvalidRequestError,
    StoreExistsError,
    StoreNotFoundError,
    WrongStateError,
)
from tdserve.cli.main import main
from tdserve.imports import import_store
from tdserve.rules.placement import choose_owner, choose_servers
from tests.integration.cluster.names import name_owned_by, next_name, read_both
from tests.processes import quiet_port, wait_for

pytestmark = pytest.mark.integration

ONLY_OF_ONE_SERVER = {
    "address",  # an attribute of a cluster's client
    *("recipe", "session", "has_session", "is_turning", "has_channel", "why_not_gloo", "why_not_nccl"),
    *(
        "call",
        "count_call",
        "hand_over",
        "make_deadline",
        "make_movers",
        "movers",
        "open_handle",
        "perform",
        "perform_in_turn",
        "is_numpy_wanted",
    ),
}
"""Names that are about the one session of a client, and those that its handles call."""

CONTENT = TensorDict({"number": torch.arange(3)}, [3])


@pytest.mark.slow
def test_stores_when_created_then_each_on_its_owner_alone(
    client: tdserve.ClusterClient, servers: list[tdserve.Server]
) -> None:
    for number, server in enumerate(servers):
        name = name_owned_by(number, len(servers))
        client.init_remote(CONTENT, name)
        with server.client() as single:
            assert name in single
        assert name in client
        assert name in client.stores()
        assert client.from_remote_init(name)["number"].tolist() == [0, 1, 2]
        client.delete(name)
        assert name not in client
        with pytest.raises(StoreNotFoundError):
            client[name]


def test_client_when_it_uses_one_server_then_connects_to_that_alone(
    address: str, servers: list[tdserve.Server]
) -> None:
    name = name_owned_by(1, 3)
    with servers[1].client() as single:
        single.init_remote(CONTENT, name)
    with tdserve.connect(address) as client:
        assert isinstance(client, tdserve.ClusterClient)
        client.from_remote_init(name)
        assert list(client.members.used) == [1]


def open_at_once(client: tdserve.ClusterClient, name: str) -> Any:
    """Opens a table without waiting for it; None if no server was reached in the moment that this takes."""
    with suppress(ConnectError):
        return client.replay(name, timeout_s=0)
    return None


@pytest.mark.slow
def test_stores_when_asked_for_once_by_a_new_client_then_found(client: tdserve.ClusterClient, address: str) -> None:
    names = [name_owned_by(server, 3) for server in range(3)]
    for name in names:
        client.init_remote(CONTENT, name)
    client.rebalance(names[0], 1)
    shared = next_name()
    client.create_replay(shared, CONTENT[0], 90, shards="all").extend(CONTENT)
    for reads_first in (True, False):
        with tdserve.connect(address) as fresh:  # it has no connection yet
            if reads_first:
                assert all(fresh.from_remote_init(name, timeout_s=0)["number"].sum() == 3 for name in names)
            opened = wait_for(lambda client=fresh: open_at_once(client, shared), "a server that is not too busy")  # type: ignore[misc]
            wait_for(lambda table=opened: not table.info()["degraded"], "an answer of each part")  # type: ignore[misc]
            assert len(opened) == 3
    for name in (*names, shared):
        client.delete(name)


def test_store_when_it_is_not_at_its_owner_then_found_and_not_created_again(
    client: tdserve.ClusterClient, servers: list[tdserve.Server]
) -> None:
    name = name_owned_by(2, 3)
    with servers[0].client() as single:
        single.init_remote(CONTENT, name)
    assert client.from_remote_init(name)["number"].tolist() == [0, 1, 2]
    assert client[name]["number"].tolist() == [0, 1, 2]
    with pytest.raises(StoreExistsError):
        client.init_remote(CONTENT, name)
    client.delete(name)
    assert name not in client


@pytest.mark.parametrize("name", ["\ud800", "", "a/b", 5])
def test_calls_when_no_store_can_have_the_name_then_refused_as_by_one_server(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: Any
) -> None:
    with tdserve.connect(servers[0].address) as one, pytest.raises(InvalidRequestError) as expected:
        one.init_remote(CONTENT, name)
    for create in (client.init_remote, client.memmap):
        with pytest.raises(InvalidRequestError) as found:
            create(CONTENT, name)
        assert str(found.value) == str(expected.value)
    with pytest.raises(InvalidRequestError):
        client.create_replay(name, CONTENT[0], 100, shards="all")
    assert name not in client


def test_creation_when_the_owner_is_down_then_raises_and_others_go_on(servers: list[tdserve.Server]) -> None:
    down = f"127.0.0.1:{quiet_port()}"
    with tdserve.connect(f"{servers[0].address},{down}", timeout_s=300.0) as client:  # it is not waited for
        name = name_owned_by(1, 2)
        for create in (client.init_remote, client.memmap):
            with pytest.raises(ConnectError, match=f"{down}: server 1, which decides about the name {name!r}"):
                create(CONTENT, name)
        with pytest.raises(ConnectError, match="server 1"):
            client.create_replay(name, CONTENT[0], 100)
        there = name_owned_by(0, 2)
        client.init_remote(CONTENT, there)
        assert there in client.stores()
        with pytest.raises(ConnectError, match=f"{down}: server 1"):
            client.create_replay(next_name(), CONTENT[0], 100, shards="all")
        assert client.stats()["lost"] == [1]
        client.delete(there)


@pytest.mark.slow
def test_shared_store_when_the_servers_are_listed_in_another_order_then_refused(
    client: tdserve.ClusterClient, servers: list[tdserve.Server], name: str
) -> None:
    table = client.create_replay(name, CONTENT[0], 90, shards="all")
    assert len(client.create_replay(name, CONTENT[0], 90, shards="all", exists_ok=True)) == len(table)
    with tdserve.connect(",".join(server.address for server in (*servers[1:], servers[0]))) as other:
        with pytest.raises(WrongStateError, match="same order"):
            other.replay(name)
        with pytest.raises(WrongStateError, match="same order"):
            other.create_replay(name, CONTENT[0], 90, shards="all", exists_ok=True)


def test_connect_when_no_server_listens_then_raises() -> None:
    with pytest.raises(ConnectError):
        tdserve.connect(f"127.0.0.1:{quiet_port()},127.0.0.1:{quiet_port()}", timeout_s=0.5)


@pytest.mark.parametrize("address", ["a:1,a:1", "a,b", "http://a:1", "dns://a", "dns://a:7707?servers=0"])
def test_connect_when_the_address_is_none_then_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError):
        tdserve.connect(address, timeout_s=0.5)


def test_wait_when_the_store_comes_later_then_found(client: tdserve.ClusterClient, address: str) -> None:
    name = next_name()
    with tdserve.connect(address) as other:
        assert isinstance(other, tdserve.ClusterClient)
        coming = other.members.get(choose_owner(name, 3)).run_later(lambda: client.replay(name, timeout_s=30.0))
        other.create_replay(name, CONTENT[0], 90, shards=2)
        handle = coming.result(30.0)
    assert isinstance(handle, tdserve.ShardedReplayHandle)
    assert handle.capacity == 90
    client.delete(name)


def test_calls_when_they_name_a_store_then_reach_its_server(client: tdserve.ClusterClient) -> None:
    name = next_name()
    assert client.publish(name, {"weight": torch.ones(3)}) == 1
    found = client.latest(name)
    assert found is not None
    assert found.data["weight"].tolist() == [1, 1, 1]
    assert client.wait_newer(name, newer_than=0) == 1
    assert [each.version for each in client.versions(name)] == [1]
    assert client.describe(name).kind == "weights"
    with client.subscribe(name) as subscription:
        assert next(subscription).version == 1
    client.delete(name)


def test_names_when_listed_then_those_of_the_client_of_one_server() -> None:
    of_one, of_several = (
        {name for name in dir(cls) if not name.startswith("_")} for cls in (tdserve.Client, tdserve.ClusterClient)
    )
    assert of_one - of_several == ONLY_OF_ONE_SERVER


def test_memmap_family_when_called_by_its_other_names_then_does_the_same(client: tdserve.ClusterClient) -> None:
    for create in (client.save, client.dumps):
        name = next_name()
        create(CONTENT, name)
        into = TensorDict({"number": torch.zeros(3, dtype=torch.int64)}, [3])
        assert client.load(name)["number"].tolist() == [0, 1, 2]
        assert client.load_(into, name)["number"].tolist() == into["number"].tolist() == [0, 1, 2]
        client.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_client_when_given_to_another_process_then_works_there(address: str, method: str) -> None:
    name, table = next_name(), next_name()
    with tdserve.connect(address) as client:
        assert isinstance(client, tdserve.ClusterClient)
        client.init_remote(CONTENT, name)
        handle = client.create_replay(table, CONTENT[0], 90, shards=3)
        handle.extend(CONTENT)
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=read_both, args=(client, handle, name))
        process.start()
        process.join(60.0)
        assert process.exitcode == 0
        read_both(client, handle, name)
        with pickle.loads(pickle.dumps(client)) as copied:
            assert copied.address == client.address
        client.delete(name)
        client.delete(table)


@pytest.mark.slow
def test_commands_when_given_several_servers_then_of_all(
    address: str, servers: list[tdserve.Server], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = next_name()

    def run(*arguments: str) -> tuple[int, str]:
        code = main([*arguments, "--address", address])
        return code, capsys.readouterr().out

    with tdserve.connect(address) as client:
        client.create_replay(name, CONTENT[0], 90, shards="all").extend(CONTENT)
        np.savez(tmp_path / "rows.npz", number=np.arange(5))
        for copy in ("first", "second", "third"):
            import_store(client, "npz", tmp_path / "rows.npz", f"{name}-{copy}")
            assert client.from_remote_init(f"{name}-{copy}")["number"].tolist() == [0, 1, 2, 3, 4]
            client.delete(f"{name}-{copy}")
        assert name in run("ls")[1].split()
        assert "number" in run("keys", name)[1]
        assert '"num_rows": 3' in run("info", name, "--json")[1]
        assert run("head", name)[0] == 0
        client.delete(name)
    assert run("health")[0] == 0
    assert main(["health", "--address", f"{servers[0].address},127.0.0.1:{quiet_port()}"]) == 1


def test_torchrl_buffer_when_of_several_servers_then_on_one_of_them(address: str) -> None:
    pytest.importorskip("torchrl")
    from torchrl.data import TensorDictReplayBuffer

    from tdserve.torchrl import TDServeStorage

    name = next_name()
    buffer = TensorDictReplayBuffer(storage=TDServeStorage(90, address=address, name=name), batch_size=2)
    buffer.extend(CONTENT)
    assert buffer.sample()["number"].shape == (2,)
    with tdserve.connect(address) as client:
        assert len(client.replay(name)) == 3
        client.delete(name)


@pytest.mark.slow
def test_creation_when_a_name_is_that_of_a_part_then_refused_and_no_other_store_is_lost(
    client: tdserve.ClusterClient, servers: list[tdserve.Server]
) -> None:
    name, row = next_name(), TensorDict({"x": torch.tensor(0.0)}, [])
    creations: list[Callable[[], object]] = [
        lambda: client.init_remote(row, f"{name}#0"),
        lambda: client.create_replay(f"{name}#0", row, 10),
        lambda: client.create_replay(f"{name}#0", row, 30, shards="all"),
        lambda: client.publish(f"{name}#0", row),
    ]
    for create in creations:
        with pytest.raises(InvalidRequestError, match="part of a store"):
            create()
    server = choose_servers(name, "all", 3)[1]
    with servers[server].client() as one:  # a client of one server may take such a name
        one.init_remote(row, f"{name}#1")
        with pytest.raises(StoreExistsError):
            client.create_replay(name, row, 30, shards="all")
        assert f"{name}#1" in one
        assert name not in client
        for other in servers:
            with other.client() as plain:
                assert f"{name}#0" not in plain
                assert f"{name}#2" not in plain
        one.delete(f"{name}#1")


def test_load_when_the_name_is_a_path_then_the_nested_part(client: tdserve.ClusterClient) -> None:
    name = next_name()
    client.memmap(TensorDict({"x": torch.arange(3), "n": {"y": torch.ones(3)}}, [3]), name)
    assert client.load_memmap(f"{name}/n")["y"].tolist() == [1.0] * 3
    client.delete(name)
