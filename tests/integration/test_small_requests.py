"""Requests over the control channel: reads that the worker answers alone, waits, and interruptions."""

from __future__ import annotations

import signal

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises
from tests.integration.forked_clients import ForkedClients
from tests.integration.programs import NUM_ROWS, row
from tests.processes import ready_worker, wait_for

pytestmark = pytest.mark.integration


def numbers(number: int) -> TensorDict:
    """Four equal numbers."""
    return TensorDict({"nested": {"number": torch.full((4,), number)}}, [4])


@pytest.mark.slow
def test_get_when_another_client_has_just_written_then_the_new_value(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.init_remote(numbers(0), name)
    with server.client(transport="gloo") as other:
        reader = other[name]
        for number in range(1, 50):
            client[name].set_at_(("nested", "number"), number, ...)
            assert reader.get(("nested", "number")).tolist() == [number] * 4
            assert reader[1:3]["nested", "number"].tolist() == [number] * 2


def test_get_when_the_store_was_deleted_or_made_anew_then_never_the_old_content(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote(numbers(1), name)
    store = client[name]
    for _ in range(3):
        assert store.get(("nested", "number")).tolist() == [1] * 4
    client.delete(name)
    with raises(tdserve.StoreNotFoundError, name=name):
        store.get(("nested", "number"))
    client.init_remote(numbers(2), name)
    assert store.get(("nested", "number")).tolist() == [2] * 4


def test_stats_when_reads_are_small_then_all_are_counted(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.init_remote(numbers(1), name)
    with server.client(transport="gloo") as remote:
        store = remote[name]
        store.get(("nested", "number"))

        def num_reads() -> int:
            found: int = remote.stats()["transports"]["inline"]["transfers_out"]
            return found

        before = num_reads()
        for _ in range(20):
            store.get(("nested", "number"))
        wait_for(lambda: num_reads() == before + 20, "the count of all of them")


@pytest.mark.slow
@pytest.mark.parametrize("client", ["gloo"], indirect=True)  # as a caller that is interrupted
@pytest.mark.parametrize("num_rows", [1, 100])
def test_sample_when_interrupted_while_it_waits_then_at_once_and_the_server_goes_on(
    server: tdserve.Server, forked_clients: ForkedClients, client: tdserve.Client, name: str, num_rows: int
) -> None:
    replay = client.create_replay(name, like=TensorDict({"x": torch.zeros(1000)}, []), capacity=200, min_size=200)
    with forked_clients.start("wait", server.address, name, num_rows) as waiting:
        assert waiting.line() == "connected"
        assert waiting.line() == "waits"
        waiting.signal(signal.SIGINT)
        assert waiting.line(timeout_s=30.0) == "interrupted"
    replay.extend(TensorDict({"x": torch.ones(200, 1000)}, [200]))
    assert replay.sample(num_rows).batch_size == (num_rows,)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["gloo"], indirect=True)  # as a client that loses its worker
@pytest.mark.parametrize("message", [1, 4, 9, 10])
def test_call_when_its_data_worker_is_killed_while_pairs_are_formed_then_its_retry_does_it(
    server: tdserve.Server, forked_clients: ForkedClients, client: tdserve.Client, name: str, message: int
) -> None:
    client.create_replay(name, like=row(), capacity=NUM_ROWS)
    pid = ready_worker(client)["pid"]
    with forked_clients.start("move", server.address, "extend", name, at=message, pid=pid, counts_mail=True) as writer:
        assert writer.line() == "connected"
        assert writer.line().startswith("done")
    wait_for(lambda: client.stats()["workers"][0]["is_ready"], "the restart of the data worker")
    assert len(client.replay(name)) == NUM_ROWS
