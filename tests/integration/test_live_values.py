"""Shared non-tensor leaves: what one process writes, the others read, however they were started."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack

import tdserve
from tdserve.structure.tensordicts.live_values import LiveNonTensorData, LiveNonTensorStack
from tests.processes import REPOSITORY, START_TIMEOUT_S, quiet_port

pytestmark = pytest.mark.integration


class Task(TensorClass):
    """A tensorclass with a non-tensor field."""

    x: torch.Tensor
    prompt: str


class Peer:
    """``live_peer.py`` in a process of its own."""

    def __init__(self, address: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.lent.program", "tests.integration.live_peer", address, name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)

    def receive(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, line: str) -> Any:
        """Returns its answer to a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.receive()


def content() -> TensorDict:
    """Two rows."""
    below: list[Any] = [["a", "b", "c"], ["d", "e", "f"]]
    nested = TensorDict({"t": NonTensorStack.from_list(below)}, [2, 3])
    one = NonTensorData({"step": 0}, batch_size=[2])
    return TensorDict({"x": torch.zeros(2), "rows": NonTensorStack("p", "q"), "one": one, "n": nested}, [2])


@pytest.fixture
def live(client: tdserve.Client, name: str) -> tdserve.StoreHandle:
    """A store of ``content()`` that shares its non-tensor leaves."""
    handle: tdserve.StoreHandle = client.memmap(content(), name, share_non_tensor=True)
    return handle


@pytest.fixture
def peer(server: tdserve.Server, live: tdserve.StoreHandle) -> Iterator[Peer]:
    """An independently started process that has the store."""
    started = Peer(server.address, live.name)
    assert started.receive() == "ready"
    yield started
    started.process.communicate("end\n", timeout=START_TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_updates_when_two_independent_processes_exchange_them_then_none_is_lost(
    client: tdserve.Client, live: tdserve.StoreHandle, peer: Peer
) -> None:
    td = client.load_memmap(live.name)
    for turn in range(20):
        td.get("one").update(NonTensorData({"mine": turn}), inplace=True)
        assert peer.ask("read one") == {"mine": turn}
        assert peer.ask(f'write one {{"theirs": {turn}}}') == "written"
        assert td["one"] == live["one"] == {"theirs": turn}


def _exchange(td: TensorDict, pipe: Connection) -> None:
    pipe.send((td["one"], td["rows"]))
    td.set_("one", pipe.recv())
    pipe.send(td["one"])


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_updates_when_a_spawned_process_was_given_the_tensordict_then_go_both_ways(
    client: tdserve.Client, live: tdserve.StoreHandle
) -> None:
    td = client.load_memmap(live.name)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_exchange, args=(td, theirs))
    process.start()
    assert mine.recv() == ({"step": 0}, ["p", "q"])
    mine.send("from a child")
    assert mine.recv() == td["one"] == "from a child"
    process.join(START_TIMEOUT_S)
    assert process.exitcode == 0


FORKED = """
import os, sys, tdserve
client = tdserve.connect(sys.argv[1], timeout_s=20.0)
td = client.load_memmap(sys.argv[2])
assert td["rows"] == ["p", "q"]
child = os.fork()
if child == 0:
    assert td["rows"] == ["p", "q"]
    td.set_at_("rows", "from the child", 1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert td["rows"] == ["p", "from the child"]
"""


@pytest.mark.full
@pytest.mark.once("shm")
def test_updates_when_a_forked_process_inherited_the_tensordict_then_go_both_ways(
    server: tdserve.Server, live: tdserve.StoreHandle
) -> None:
    command = [sys.executable, "-c", FORKED, server.address, live.name]
    # gRPC's own threads do not survive a fork otherwise.
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=START_TIMEOUT_S)
    assert live["rows"] == ["p", "from the child"]


def test_leaves_when_read_of_the_handle_then_live_by_key_int_and_slice(live: tdserve.StoreHandle) -> None:
    one, row, part, mask = live.get("one"), live[1], live[0:1], live[torch.tensor([True, False])]
    assert type(one) is LiveNonTensorData
    assert type(live.get("rows")) is type(part.get("rows")) is LiveNonTensorStack
    live["rows"] = ["y", "z"]
    live["one"] = None
    assert (one.data, row["one"], row["rows"], part["rows"], mask["rows"]) == (None, None, "z", ["y"], ["p"])
    row.set_("rows", "through a row")
    live["n"].get("t")[0, 2] = "below the rows"
    assert live["rows"] == ["y", "through a row"]
    assert live["n", "t"] == [["a", "b", "below the rows"], ["d", "e", "f"]]


def test_leaves_when_in_a_lazy_stack_then_each_row_is_live(client: tdserve.Client, name: str) -> None:
    rows = [TensorDict({"x": torch.zeros(size), "text": f"text {size}"}, []) for size in (2, 3)]
    handle = client.memmap(TensorDict({"rows": lazy_stack(rows)}, [2]), name, share_non_tensor=True)
    found, again = client.load_memmap(name), client.from_remote_init(name)
    handle.set_at_(("rows", "text"), "by the handle", 1)
    assert list(found["rows", "text"]) == list(again["rows", "text"]) == ["text 2", "by the handle"]
    found["rows"][0].get("text").update(NonTensorData("through a row"), inplace=True)
    assert list(handle["rows", "text"]) == list(again["rows", "text"]) == ["through a row", "by the handle"]


def test_leaves_when_the_store_is_mapped_then_live_beside_its_memory(
    server: tdserve.Server, live: tdserve.StoreHandle
) -> None:
    with server.client(timeout_s=20.0, transport="shm") as client:
        td = client[live.name].map()
        live.update_({"x": torch.ones(2), "one": "newer"})
        assert (td["one"], td["x"].tolist(), td.is_locked) == ("newer", [1.0, 1.0], True)


def test_leaves_when_a_snapshot_is_asked_for_then_plain(live: tdserve.StoreHandle) -> None:
    assert type(live.to_tensordict().get("one")) is NonTensorData
    assert type(live.snapshot_at("one", ...)) is NonTensorData


def test_leaves_when_the_store_does_not_share_then_plain(client: tdserve.Client, name: str) -> None:
    handle = client.memmap(content(), name)
    assert not client.describe(name).share_non_tensor
    assert type(handle.get("one")) is type(client.load_memmap(name).get("one")) is NonTensorData


def test_memmap__when_shared_then_the_tensordict_itself_is_live_and_locked(client: tdserve.Client, name: str) -> None:
    td = content()
    assert client.memmap_(td, name, share_non_tensor=True) is td
    assert td.is_locked
    client[name].set("one", "newer")
    assert td["one"] == "newer"
    td.update_({"one": "newest", "x": torch.ones(2)})
    assert client[name]["one"] == "newest"
    assert torch.equal(td["x"], torch.ones(2))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_memmap__when_memory_is_shared_then_its_tensors_show_later_writes(
    server: tdserve.Server, name: str, transport: Literal["gloo", "shm"]
) -> None:
    with server.client(timeout_s=20.0, transport=transport) as client:
        td = client.memmap_(content(), name)
        client[name]["x"] = torch.ones(2)
        assert td.is_locked
        assert td["x"].tolist() == ([1.0, 1.0] if transport == "shm" else [0.0, 0.0])
        assert type(td.get("one")) is NonTensorData


def test_memmap_like_and_init_remote_when_shared_then_so_is_what_is_loaded(client: tdserve.Client, name: str) -> None:
    row = TensorDict({"x": torch.zeros(3), "prompt": "none yet"}, [])
    handle = client.memmap_like(row, name, batch_size=[4], share_non_tensor=True)
    td = client.load_memmap(name)
    handle.set_at_("prompt", "first", 0)
    assert td.get("prompt").tolist() == ["first", "none yet", "none yet", "none yet"]
    client.delete(name)
    client.init_remote(content(), name, share_non_tensor=True)
    td = client.from_remote_init(name)
    client[name].set_non_tensor("one", 7)
    assert td["one"] == 7


def test_tensorclass_when_shared_then_its_attribute_is_live(client: tdserve.Client, name: str) -> None:
    task = Task(x=torch.zeros(2), prompt="old", batch_size=[2])
    client.memmap_(task, name, share_non_tensor=True)
    loaded = client.load_memmap(name)
    client[name].set("prompt", "new")
    assert (task.prompt, loaded.prompt, type(loaded)) == ("new", "new", Task)


def test_live_tensordict_when_written_elsewhere_then_its_values_travel(
    client: tdserve.Client, live: tdserve.StoreHandle
) -> None:
    td = client.load_memmap(live.name)
    other = f"{live.name[-100:]}-copy"
    client.memmap(td, other)
    assert client[other].to_tensordict().get("rows").tolist() == ["p", "q"]
    replay = client.create_replay(f"{other}-replay", like=td[0], capacity=4)
    replay.extend(td)
    assert replay[0:2]["one"] == [{"step": 0}] * 2
    client.delete(other)
    client.delete(f"{other}-replay")


def test_live_tensordict_when_received_into_then_stays_live(client: tdserve.Client, live: tdserve.StoreHandle) -> None:
    td = client.load_memmap(live.name)
    td.lock_()
    assert client.recv(td, live.name) is not None
    live["one"] = "after"
    assert td["one"] == "after"


def test_leaf_when_pickled_then_of_the_same_store_over_the_client_of_its_process(
    client: tdserve.Client, live: tdserve.StoreHandle
) -> None:
    leaf = live.get("one")
    other_client, other = pickle.loads(pickle.dumps((client, leaf)))
    with other_client:
        other.data = "through the pickle"
        assert leaf.data == "through the pickle"
    assert other.data == "through the pickle"  # it was not that client's


def test_leaf_when_the_store_is_deleted_then_store_not_found(client: tdserve.Client, live: tdserve.StoreHandle) -> None:
    leaf, stack = live.get("one"), live.get("rows")
    client.delete(live.name)
    for look in (lambda: leaf.data, stack.tolist, lambda: leaf.update_(NonTensorData(1)), lambda: live["one"]):
        with pytest.raises(tdserve.StoreNotFoundError):
            look()
    client.memmap(content(), live.name)


@pytest.mark.slow
def test_leaf_when_the_server_was_restarted_then_goes_on_and_still_shared(tmp_path: Path) -> None:
    port = quiet_port()
    first = tdserve.Server(tmp_path, port=port).start()
    client = first.client(timeout_s=30.0)
    td = client.memmap_(content(), "batch", share_non_tensor=True)
    first.shutdown(timeout_s=0.1)
    with tdserve.Server(tmp_path, port=port), client:
        assert td["one"] == {"step": 0}
        assert client.describe("batch").share_non_tensor
        td.set_("one", "after")
        assert client["batch"]["one"] == "after"
