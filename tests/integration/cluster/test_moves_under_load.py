"""Stores move while they are used; nothing is lost, doubled or torn, whoever is killed in the middle."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    DeadlineExceededError,
    StoreMovedError,
    VersionConflictError,
    WrongStateError,
)
from tdserve.client.moves.move_steps import request_step
from tests.integration.cluster.moving import ROW, choose_other, complete_only, list_files, make_rows, release_only
from tests.integration.cluster.names import name_owned_by, next_name
from tests.processes import quiet_port, wait_for

pytestmark = pytest.mark.integration


# ---------------------------------------------------------------- what is cut short


@pytest.mark.slow
def test_mover_when_it_is_lost_after_the_seal_then_the_store_serves_again(
    client: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = client.create_replay(name, ROW, 100)
    table.extend(make_rows(0, 4))
    with tdserve.connect(address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        at_source, uid = list_files(mover, name)
        at_source(uid=uid, move=f"{3:032x}", seal=True)
        waiting = table.extend(make_rows(4, 4), return_early=True)
        with pytest.raises((StoreMovedError, DeadlineExceededError)):  # the latter if the first is already being
            # retried
            table.extend(make_rows(8, 4), timeout_s=0.3)
    waiting.result(timeout=30)
    assert sorted(table[:]["number"].tolist()) == list(range(8))
    client.rebalance(name, choose_other(client, name))
    assert len(table) == 8


@pytest.mark.slow
def test_mover_when_it_is_lost_after_the_release_then_the_next_request_finishes(tmp_path: Path) -> None:
    servers = [tdserve.Server(tmp_path / f"root{number}", port=quiet_port()).start() for number in range(2)]
    address = ",".join(server.address for server in servers)
    try:
        with tdserve.connect(address) as client, tdserve.connect(address) as mover:
            assert isinstance(client, tdserve.ClusterClient)
            assert isinstance(mover, tdserve.ClusterClient)
            store = client.memmap(TensorDict({"x": torch.arange(3)}, [3]), "moved")
            target = choose_other(client, "moved")
            release_only(mover, "moved", target, move=f"{1:032x}")
            os.kill(servers[target].pid, signal.SIGKILL)
            wait_for(lambda: not servers[target].is_alive, "the end of the server")
            servers[target].start()
            assert store["x"].tolist() == [0, 1, 2]
            assert client.find_server("moved") == target
    finally:
        for server in servers:
            server.shutdown()


def test_move_when_given_up_then_what_had_come_is_never_shown(
    client: tdserve.ClusterClient, address: str, name: str
) -> None:
    store = client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    target, move = choose_other(client, name), f"{2:032x}"
    with tdserve.connect(address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        at_source, uid = list_files(mover, name)
        sealed = at_source(uid=uid, move=move, seal=True)
        at_target = partial(request_step, mover.members.get(target), name, move=move)
        at_target(receive=sealed.files)
        at_target(complete=sealed.store)
    store.set_at_("x", torch.tensor(9), 0)
    at_source, _ = list_files(client, name)
    with pytest.raises(WrongStateError, match="not sealed"):
        at_source(uid=uid, move=move, release=target)
    client.rebalance(name, target)
    assert store["x"].tolist() == [9, 1, 2]


@pytest.mark.slow
def test_mover_when_it_is_lost_before_the_release_then_the_next_move_removes_what_has_come(
    client: tdserve.ClusterClient, address: str, name: str
) -> None:
    store = client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    source, move, other = client.find_server(name), f"{4:032x}", next_name()
    target = choose_other(client, name)
    arrived = Path(client.members.get(target).stats()["root"], "arriving", move)
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), other)
    with tdserve.connect(address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        complete_only(mover, name, target, move=move)
        client.rebalance(other, source)
        client.rebalance(other, target)
        assert arrived.exists()  # its mover still has the store sealed
    assert store["x"].tolist() == [0, 1, 2]  # after the end of the seal

    def is_removed() -> bool:
        client.rebalance(other, source)
        client.rebalance(other, target)
        return not arrived.exists()

    wait_for(is_removed, "the removal, for which all servers must answer")
    client.delete(other)


@pytest.mark.slow
def test_creation_when_a_lost_mover_had_brought_a_store_of_the_name_then_that_is_removed(
    client: tdserve.ClusterClient, address: str
) -> None:
    name = name_owned_by(1, len(client.members))
    client.memmap(TensorDict({"x": torch.arange(3)}, [3]), name)
    client.rebalance(name, 0)
    with tdserve.connect(address) as mover:
        assert isinstance(mover, tdserve.ClusterClient)
        complete_only(mover, name, 1, move=f"{4:032x}")
    client.delete(name)
    made = client.memmap(TensorDict({"x": torch.arange(5)}, [5]), name)
    assert (made["x"].tolist(), client.find_server(name)) == ([0, 1, 2, 3, 4], 1)
    client.delete(name)


@pytest.mark.slow
def test_seal_when_a_request_is_waiting_then_it_goes_on_at_the_other_server(
    user: tdserve.ClusterClient, name: str
) -> None:
    queue = user.create_queue(name, ROW, 10)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.take, 2, ack=False, timeout_s=60.0)
        wait_for(lambda: user.describe(name).num_waiting, "the wait of the reader")
        user.rebalance(name, choose_other(user, name))
        queue.extend(make_rows(0, 2))
        assert waiting.result(timeout=60)["number"].tolist() == [0, 1]


def test_move_when_the_time_is_over_then_the_store_serves_where_it_was(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, ROW, 100)
    table.extend(make_rows(0, 4))
    before = client.find_server(name)
    with pytest.raises(DeadlineExceededError):
        client.rebalance(name, choose_other(client, name), timeout_s=0.0)
    assert client.find_server(name) == before
    table.extend(make_rows(4, 4))


# ---------------------------------------------------------------- under load


@pytest.mark.slow
def test_stores_when_they_move_all_the_time_then_nothing_is_lost_or_doubled(address: str) -> None:
    chance, is_over = random.Random(5), Event()
    names = {kind: next_name() for kind in ("table", "keyed")}

    def write(writer: int, transport: str) -> int:
        number = 0
        with tdserve.connect(address, transport=transport) as client:  # type: ignore[arg-type]
            table = client.replay(names["table"])
            under_way: list[Any] = []
            while not is_over.is_set():
                rows = make_rows(writer * 1_000_000 + number, 3)
                under_way.append(table.extend(rows, return_early=writer % 2 == 0))
                if writer % 2 == 0 and len(under_way) > 4:
                    under_way.pop(0).result(timeout=60)
                number += 3
            for each in under_way if writer % 2 == 0 else ():
                each.result(timeout=60)
        return number

    def count(transport: str) -> int:
        counted = 0
        with tdserve.connect(address, transport=transport) as client:  # type: ignore[arg-type]
            keyed = client.kv(names["keyed"])
            while not is_over.is_set():
                value, version = keyed.get_with_versions("n")
                try:
                    keyed.put("n", value + 1, if_version=version)
                    counted += 1
                except VersionConflictError:
                    continue
        return counted

    with tdserve.connect(address) as client, ThreadPoolExecutor(6) as threads:
        assert isinstance(client, tdserve.ClusterClient)
        client.create_replay(names["table"], ROW, 1_000_000)
        client.create_kv(names["keyed"])["n"] = 0
        writers = [threads.submit(write, writer, ("shm", "shm", "gloo", "gloo")[writer]) for writer in range(4)]
        counters = [threads.submit(count, transport) for transport in ("shm", "gloo")]
        try:
            for _ in range(6):
                for name in names.values():
                    client.rebalance(name, chance.randrange(3))
        finally:
            is_over.set()
        written = [future.result(timeout=60) for future in writers]
        expected = [1_000_000 * writer + row for writer, rows in enumerate(written) for row in range(rows)]
        assert sorted(client.replay(names["table"])[:]["number"].tolist()) == expected
        counted = sum(future.result(timeout=60) for future in counters)  # before the look: the last of them go on
        assert client.kv(names["keyed"])["n"] == counted
        for name in names.values():
            client.delete(name)


@pytest.mark.slow
def test_list_when_a_store_moves_all_the_time_then_always_has_it(
    servers: list[tdserve.Server], client: tdserve.ClusterClient, address: str, name: str
) -> None:
    client.memmap(TensorDict({"x": torch.zeros(3)}, [3]), name)
    is_over = Event()

    def move() -> int:
        num_moves = 0
        with tdserve.connect(address) as mover:
            assert isinstance(mover, tdserve.ClusterClient)
            while not is_over.is_set() or num_moves < 10:
                mover.rebalance(name, (mover.find_server(name) + 1) % 3)
                num_moves += 1
        return num_moves

    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move)
        try:
            lists = [client.stores(name) for _ in range(1000)]
        finally:
            is_over.set()
        assert moving.result(timeout=60) >= 10
    assert [listed for listed in lists if name not in listed] == []
    client.rebalance(name, 2)
    with tdserve.connect(",".join(server.address for server in servers[:2])) as some:  # one has a record of it
        assert name not in some.stores()
    client.delete(name)
    assert name not in client.stores()
