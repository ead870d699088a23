"""Clients of several servers that nobody has closed."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import tdserve
from tests.integration.cluster.moving import ROW, choose_other, make_rows
from tests.integration.cluster.names import name_owned_by
from tests.integration.test_dropped_clients import warned_of
from tests.processes import wait_for
from tests.threads import find_threads

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0


def list_sessions(client: tdserve.ClusterClient) -> set[tuple[int, int]]:
    """Returns the numbers of the servers and of their open sessions."""
    servers = client.stats()["servers"]
    return {(number, each["session"]) for number, found in servers.items() for each in found["sessions"]}


def open_all(address: str, transport: Any) -> tdserve.ClusterClient:
    """Returns a client that has a session with each server."""
    client = tdserve.connect(address, transport=transport)
    assert isinstance(client, tdserve.ClusterClient)
    client.stats()
    for server in range(len(client.members)):
        member = client.members.get(server)
        member.call(lambda *_: None, member.make_deadline(None))
    return client


@pytest.mark.parametrize("transport", ["shm", "gloo", "grpc"])
def test_cluster_client_when_dropped_then_all_of_its_sessions_and_threads_end_with_one_warning(
    user: tdserve.ClusterClient, address: str, name: str, transport: Any
) -> None:
    user.publish(name, ROW)
    followed_by = name_owned_by(choose_other(user, name), len(user.members))
    before, threads = list_sessions(user), len(find_threads("tdserve-policy"))
    client = open_all(address, transport)
    table = client.create_replay(followed_by, ROW, 100, policy=name)  # a thread follows the weights for it
    table.extend(make_rows(0, 4))
    own = list_sessions(user) - before
    assert len(own) == len(user.members)
    assert len(find_threads("tdserve-policy")) == threads + 1
    del client
    gc.collect()
    table.extend(make_rows(4, 4))
    assert own <= list_sessions(user)
    with warned_of(address):
        del table
        wait_for(lambda: gc.collect() is None or not own & list_sessions(user), "their end", timeout_s=TIMEOUT_S)
    wait_for(lambda: len(find_threads("tdserve-policy")) == threads, "the end of the thread", timeout_s=TIMEOUT_S)
    user.delete(followed_by)


def test_handle_of_shards_when_all_else_is_dropped_then_it_goes_on(
    user: tdserve.ClusterClient, address: str, name: str
) -> None:
    table = open_all(address, "shm").create_replay(name, ROW, 90, shards="all")
    gc.collect()
    table.extend(make_rows(0, 30))
    batches = table.batches(4)
    before = list_sessions(user)
    with warned_of(address):
        del table
        gc.collect()
        assert len(next(batches)) == 4
        assert before == list_sessions(user)
        del batches
        wait_for(lambda: gc.collect() is None or list_sessions(user) < before, "their end", timeout_s=TIMEOUT_S)
