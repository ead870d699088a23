"""Local clients in a PID namespace of their own, as in another container: the server reads values for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.local import end

pytestmark = pytest.mark.integration

NUM_READS = 15
NUM_LARGE = 600_000
"""More numbers than fit into an entry that is part of a message."""

NUM_ROWS = 20_000
"""More than the server reads values of at a time."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("lacking"), port=0) as started:
        yield started


@pytest.fixture
def client(server: tdserve.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tdserve.Client]:
    """A client that sees the server's files, but other process ids."""
    monkeypatch.setattr(end, "read_pid_namespace", lambda: "another")
    with server.client(transport="shm", timeout_s=30.0) as made:
        made.stores()
        made.stats()
        assert made.transport == "shm"
        yield made


def pair(number: int) -> TensorDict:
    """Returns a tensor and a value that contain the same number."""
    return TensorDict({"a": torch.tensor(number), "text": NonTensorData(str(number))}, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [slice(0, 2), *(pytest.param(index, marks=pytest.mark.full) for index in ((), [1, 0]))]
)
def test_read_when_others_write_then_tensors_and_values_are_as_of_one_moment(
    server: tdserve.Server, client: tdserve.Client, index: Any
) -> None:
    name = f"pairs-{index}"
    is_over = threading.Event()
    with server.client(transport="gloo", timeout_s=30.0) as other:
        other.init_remote(torch.stack([pair(0), pair(0)]), name)
        written = other[name]

        def write() -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                written[:] = torch.stack([pair(number), pair(number)])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            handle, num_reads = client[name], 0
            seen: set[int] = set()
            deadline = Deadline.after(60.0)
            # A busy machine may hold the writer up.
            while num_reads < NUM_READS or (len(seen) == 1 and not deadline.expired):
                num_reads += 1
                found = handle[index]
                assert [int(text) for text in found["text"]] == found["a"].tolist()
                seen.add(found["a"][0].item())
        finally:
            is_over.set()
            writer.join()
    assert len(seen) > 1


@pytest.mark.slow
def test_rows_when_many_are_read_then_each_has_its_value(server: tdserve.Server, client: tdserve.Client) -> None:
    batch = TensorDict({"a": torch.arange(NUM_ROWS), "text": NonTensorStack(*map(str, range(NUM_ROWS)))}, [NUM_ROWS])
    table = client.create_replay("many", batch[0], capacity=NUM_ROWS)
    with server.client(transport="gloo", timeout_s=30.0) as other:
        other.replay("many").extend(batch)
    for found in (table[:], table.sample(NUM_ROWS)):
        assert [int(text) for text in found["text"]] == found["a"].tolist()
    client.init_remote(batch, "dense")
    found = client.from_remote_init("dense")
    assert [int(text) for text in found["text"]] == list(range(NUM_ROWS))


def test_entries_when_the_server_reads_them_then_as_for_every_client(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    kv = client.create_kv("entries")
    with pytest.raises(tdserve.KeyNotFoundError):
        kv["a"]
    kv.put(["a", "b", "c"], ["text", torch.arange(100_000), None])
    found = kv.get(["a", "b", "c"], timeout_s=5.0)
    assert (found[0], found[2]) == ("text", None)
    assert torch.equal(found[1], torch.arange(100_000))
    assert kv.versions(["c", "x"]) == [kv.versions("c"), 0]
    assert kv.pop("a") == "text"
    assert kv.keys() == ["b", "c"]
    kv["large"] = torch.arange(NUM_LARGE)
    assert torch.equal(kv["large"], torch.arange(NUM_LARGE))


@pytest.mark.slow
def test_entries_when_gloo_cannot_connect_then_they_come_over_the_servers_port(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end, "read_pid_namespace", lambda: "another")
    monkeypatch.setenv("TDSERVE_INTERFACE", "127.0.0.1")
    monkeypatch.setattr("tdserve.client.session.session.find_content_address", lambda *_: "192.0.2.1")
    with server.client(transport="shm", timeout_s=30.0) as client:
        kv = client.create_kv("far-entries")
        kv["large"] = torch.arange(NUM_LARGE)
        assert torch.equal(kv["large"], torch.arange(NUM_LARGE))
        assert client.stats()["transport"] == "shm"
