"""Keys of a store that come and go while others read and write it, and while the server is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises
from tests.integration.conftest import FreshServer, example
from tests.integration.crashing import Crashing, Writer
from tests.processes import wait_for
from tests.sameness import difference

pytestmark = pytest.mark.integration

ROWS = 64
CHANNEL_FLOATS = 20_000
"""Of a row, so that content goes over the channel."""


@pytest.fixture(params=["gloo", "shm"])
def other(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Another client of the shared server, over either transport."""
    with server.client(transport=request.param, timeout_s=20.0) as connected:
        yield connected


def full(number: int, *shape: int) -> torch.Tensor:
    """A leaf that holds one number."""
    return torch.full((ROWS, *shape), number, dtype=torch.int64)


def rows(number: int = 0) -> TensorDict:
    """A store's content."""
    return TensorDict({"x": full(number, 8), "n": {"y": full(number)}}, [ROWS])


def folder_of(client: tdserve.Client, name: str) -> Path:
    return Path(client.stats()["root"]) / client.describe(name).path


@pytest.mark.slow
@pytest.mark.parametrize("num_floats", [4, CHANNEL_FLOATS])
def test_set_when_the_key_is_new_then_another_client_sees_its_content(
    client: tdserve.Client, other: tdserve.Client, name: str, num_floats: int
) -> None:
    client.init_remote(rows(), name)
    mine, theirs = client[name], other[name]
    theirs[0]
    content = torch.randn(ROWS, num_floats)
    mine["z"] = content
    mine["n", "deep", "text"] = "text"
    assert torch.equal(theirs["z"], content)
    assert torch.equal(theirs[3:5]["z"], content[3:5])
    assert theirs["n", "deep", "text"] == "text"
    expected = rows().set("z", content)
    expected["n", "deep", "text"] = "text"
    assert difference(expected, other.from_remote_init(name)) is None
    plain = TensorDict.load_memmap(folder_of(client, name) / "rows", allow_pickle=False)
    assert torch.equal(plain["z"], content)
    assert ("n", "deep") in plain.keys(True)


@pytest.mark.slow
def test_set_when_another_client_has_removed_the_key_then_it_is_added_again(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    client.init_remote(rows(), name)
    mine, theirs = client[name], other[name]
    writes: list[Callable[[], Any]] = [
        lambda: mine.set("x", full(1, 8)),
        lambda: mine.update({"x": full(1, 8)}),
        lambda: mine.update({"x": full(1, 8), "z": full(2)}),
        lambda: mine.__setitem__("x", full(1, 8)),
    ]
    for write in writes:
        theirs.refresh()
        theirs.pop("x")
        write()
        assert torch.equal(theirs["x"], full(1, 8))
    theirs.pop("x")
    with raises(tdserve.KeyNotFoundError, key="x"):
        mine.set_("x", full(1, 8))


def test_recv_and_send_when_of_the_structure_before_then_the_key_is_named(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    client.init_remote(rows(), name)
    client[name]["z"] = full(1)
    into = rows(7)
    for call in (lambda: other.recv(into, name), lambda: other.send(rows(8), name)):
        with raises(tdserve.SpecMismatchError, key="z"):
            call()
    assert difference(rows(7), into) is None
    version = other.send(rows(8).set("z", full(2)), name)
    assert client.recv(into.set("z", full(0)), name) == version
    assert difference(rows(8).set("z", full(2)), into) is None


def test_recv_when_keys_come_then_that_is_a_newer_version(client: tdserve.Client, name: str) -> None:
    before = client.init_remote(rows(), name)
    client[name]["z"] = full(1)
    into = rows().set("z", full(0))
    assert client.recv(into, name, newer_than=before, timeout_s=20.0) == client.describe(name).version > before
    assert torch.equal(into["z"], full(1))


def test_map_when_a_key_goes_then_what_was_mapped_stays(server: tdserve.Server, name: str) -> None:
    with server.client(transport="shm") as local:
        local.init_remote(rows(3), name)
        handle = local[name]
        mapped = handle.map()
        handle.pop("x")
        handle["x"] = full(4)
        handle["n", "y"] = full(5)
        assert torch.equal(mapped["x"], full(3, 8))
        assert torch.equal(mapped["n", "y"], full(5))
        assert torch.equal(handle.map()["x"], full(4))


@pytest.mark.slow
def test_set_when_two_add_different_keys_at_once_then_both_are_there(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    client.init_remote(rows(), name)
    meeting = Barrier(2)

    def add(handle: Any, first: int) -> None:
        for number in range(first, first + 20, 2):
            meeting.wait(20.0)
            handle[f"z{number}"] = full(number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (client[name], other[name]), (0, 1)))
    found = client.from_remote_init(name)
    for number in range(20):
        assert torch.equal(found[f"z{number}"], full(number))


@pytest.mark.slow
def test_set_when_two_add_the_same_key_then_one_overwrites_the_other(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    client.init_remote(rows(), name)
    meeting = Barrier(2)

    def add(handle: Any, number: int) -> None:
        for key in range(8):
            meeting.wait(20.0)
            handle[f"z{key}"] = full(number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (client[name], other[name]), (1, 2)))
    found = client.from_remote_init(name)
    for key in range(8):
        assert int(found[f"z{key}"][0]) in (1, 2)
        assert torch.equal(found[f"z{key}"], full(int(found[f"z{key}"][0])))


def check_whole(td: TensorDict) -> None:
    """Checks that all leaves of a read are from one moment: leaves that were added together appear together."""
    numbers = [td[key] for key in ("z", ("n", "z")) if key in td.keys(True)]
    assert len(numbers) in (0, 2), td
    if numbers:
        number = int(numbers[0].flatten()[0])
        assert number > 0
        assert all(bool((each == number).all()) for each in numbers)
        assert td["t"] == f"text {number}"
    assert bool((td["x"] == td["n", "y"].unsqueeze(-1)).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "other"),
    [
        ("gloo", "shm"),
        ("shm", "gloo"),
        pytest.param("gloo", "gloo", marks=pytest.mark.full),
        pytest.param("shm", "shm", marks=pytest.mark.full),
    ],
    indirect=True,
)
def test_read_when_keys_come_and_go_then_always_of_one_structure(
    client: tdserve.Client, other: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    client.init_remote(rows(), name)
    is_over = Event()
    begins = Barrier(5)

    def read(reading: Callable[[Any], Any]) -> int:
        num_reads = 0
        with server.client(transport=other.transport, timeout_s=20.0) as reader:
            handle = reader[name]
            begins.wait(60.0)
            while not is_over.is_set():
                check_whole(reading(handle))
                num_reads += 1
        return num_reads

    def write() -> None:
        handle = other[name]
        number = 0
        begins.wait(60.0)
        while not is_over.is_set():
            number += 1
            handle.update_({"x": full(number, 8), ("n", "y"): full(number)})

    readings: list[Callable[[Any], Any]] = [lambda h: h[:], lambda h: h[5], lambda h: h[torch.tensor([3, 1])]]
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, reading) for reading in readings]
        writer = pool.submit(write)
        try:
            handle = client[name]
            begins.wait(60.0)
            for number in range(1, 9):
                handle.update({"z": full(number, 40), ("n", "z"): full(number), "t": f"text {number}"})
                if number % 2:
                    other_number = 100 + number
                    known = {"z": full(other_number, 40), ("n", "z"): full(other_number), "t": f"text {other_number}"}
                    handle.update({**known, "u": "new"})
                handle.exclude("z", ("n", "z"), "t", "u", inplace=True)
        finally:
            is_over.set()
        assert all(reader.result(30.0) > 0 for reader in readers)
        writer.result(30.0)


@pytest.mark.slow
@pytest.mark.once("shm")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_alter_when_the_server_is_killed_at_any_moment_then_keys_are_whole_or_absent(
    tmp_path: Path, transport: str
) -> None:
    with Crashing(tmp_path) as crashing:
        client = crashing.server.client(transport=transport, timeout_s=60.0)
        client.init_remote(rows(), "x")
        handle = client["x"]

        def write(number: int) -> None:
            handle.update({f"z{number}": full(number, 3), f"t{number}": f"text {number}"})
            handle.rename_key_(f"z{number}", ("n", f"r{number}"))
            if number > 3:
                handle.pop(f"t{number - 3}")

        writer = Writer(write)
        for _ in range(2):
            writer.goes_on()
            crashing.restart()
        writer.goes_on()
        last = writer.end()[-1]
        client.close()
        crashing.restart()
        with crashing.server.client(transport=transport) as again:
            found = again.from_remote_init("x")
            for number in range(1, last + 1):
                assert torch.equal(found["n", f"r{number}"], full(number, 3))
                assert f"z{number}" not in found
                assert (f"t{number}" in found) == (number > last - 3)
                assert f"t{number}" not in found or found[f"t{number}"] == f"text {number}"
            names = {path.name for path in folder_of(again, "x").iterdir() if not path.name.startswith("synced")}
            assert names - {"record.json"} == {"generation.memmap", "objects", "rows"}


@pytest.mark.slow
def test_alter_when_the_data_worker_is_killed_then_done_all_the_same(fresh_server: FreshServer) -> None:
    server = fresh_server()
    with server.client(transport="gloo", timeout_s=60.0) as client:
        client.init_remote(rows(), "x")
        handle = client["x"]
        writer = Writer(lambda number: handle.update({f"z{number}": full(number, 3000), f"t{number}": "text"}))
        for _ in range(2):
            writer.goes_on()
            (worker,) = client.catalog.get_server_stats().workers
            os.kill(worker.pid, signal.SIGKILL)
        writer.goes_on()
        numbers = writer.end()
        found = client.from_remote_init("x")
        for number in numbers:
            assert torch.equal(found[f"z{number}"], full(number, 3000))
            assert found[f"t{number}"] == "text"


@pytest.mark.once("gloo")
def test_alter_when_its_client_dies_while_it_fills_then_nothing_is_left_of_it(
    server: tdserve.Server, client: tdserve.Client, name: str, forked_clients: Any
) -> None:
    client.memmap(example(8), name)
    with forked_clients.start("write", server.address, "add_key", name, 5, at=0) as writer:
        assert writer.line() == "connected shm"
        writer.wait_killed()
    handle = client[name]
    assert difference(example(8), handle.to_tensordict()) is None
    folder = folder_of(client, name)
    wait_for(lambda: not list(folder.glob("altering-*")) or None, "the end of what was left")
    handle["z"] = torch.ones(8)
    assert handle["z"].tolist() == [1.0] * 8


@pytest.mark.slow
def test_lock_when_the_server_was_restarted_then_still_locked(tmp_path: Path) -> None:
    with Crashing(tmp_path) as crashing:
        with crashing.server.client() as client:
            client.memmap(rows(), "x").lock_()
        crashing.restart()
        with crashing.server.client() as client:
            handle = client["x"]
            assert handle.is_locked
            assert handle.to_tensordict().is_locked
            with pytest.raises(tdserve.LockedError, match="unlock_"):
                handle["z"] = full(1)
            handle.unlock_()["z"] = full(1)
            assert torch.equal(client.from_remote_init("x")["z"], full(1))


@pytest.mark.slow
def test_set_when_the_store_was_adopted_then_its_folder_stays_the_users(tmp_path: Path) -> None:
    rows().memmap(tmp_path / "users")
    with tdserve.Server(tmp_path / "root", port=0) as server, server.client(transport="shm") as client:
        handle = client.adopt(tmp_path / "users", "x")
        with pytest.raises(tdserve.NotSupportedError, match="users"):
            handle["z"] = full(1)
        with handle.lock_():
            assert client["x"].is_locked
        handle["x"] = full(2, 8)
        assert torch.equal(handle["x"], full(2, 8))
