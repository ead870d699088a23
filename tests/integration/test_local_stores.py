"""Stores that local clients have mapped, while others delete them, make them anew, and overwrite them."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises
from tests.integration.forked_clients import ForkedClients
from tests.integration.local_roles import NUM_ROWS, numbers_in, row, rows

pytestmark = pytest.mark.integration

BEFORE, LOST, AFTER = 1, 9, 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("stores"), port=0) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport="shm", timeout_s=20.0) as made:
        yield made


@pytest.fixture(scope="module")
def other(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport="gloo", timeout_s=20.0) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "text"])
def test_handle_when_another_has_made_the_store_anew_then_the_old_files_are_never_read(
    client: tdserve.Client, other: tdserve.Client, text: str
) -> None:
    name = f"anew-{text}"
    handle = client.memmap(rows(BEFORE, text=text), name)
    assert numbers_in(handle[:]) == numbers_in(handle[0]) * NUM_ROWS == [BEFORE] * NUM_ROWS
    for number in range(AFTER, AFTER + 3):
        other.delete(name)
        for index in (0, slice(None)):
            with pytest.raises(tdserve.StoreNotFoundError):
                handle.__getitem__(index)
        with pytest.raises(tdserve.StoreNotFoundError):
            handle[0] = rows(LOST, 1, text=text)[0]
        other.init_remote(rows(number, text=text), name)
        assert numbers_in(handle[0]) == [number]
        assert numbers_in(client.from_remote_init(name)) == [number] * NUM_ROWS
        handle[1] = rows(number + 50, 1, text=text)[0]
        assert numbers_in(other.from_remote_init(name))[:3] == [number, number + 50, number]
    other.delete(name)
    other.init_remote(rows(AFTER, text=text).exclude("last"), name)
    for found in (handle[:], client.from_remote_init(name)):
        assert set(found.keys()) == {"first", "body", *(["text"] if text else [])}
        assert found["first"].tolist() == [AFTER] * NUM_ROWS


def test_replay_when_another_has_made_it_anew_then_the_old_files_are_never_read(
    client: tdserve.Client, other: tdserve.Client
) -> None:
    replay = client.create_replay("replay", row("text"), NUM_ROWS)
    replay.extend(rows(BEFORE, text="text"))
    for number in range(AFTER, AFTER + 3):
        assert set(numbers_in(replay.sample(50))) == {number - 1 if number > AFTER else BEFORE}
        other.delete("replay")
        with pytest.raises(tdserve.StoreNotFoundError):
            replay.sample(1, timeout_s=0)
        other.create_replay("replay", row("text"), NUM_ROWS).extend(rows(number, text="text"))
        assert set(numbers_in(replay.sample(50))) == {number}
        replay.extend(rows(number, 1, text="text"))
        assert numbers_in(other.replay("replay")[:]) == [number] * NUM_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["extend", "overwrite", "read"])
def test_store_when_it_is_made_anew_while_a_client_maps_it_then_the_new_one_is_untouched(
    forked_clients: ForkedClients, server: tdserve.Server, client: tdserve.Client, kind: str
) -> None:
    name = f"mapped-{kind}"

    def make(number: int) -> Any:
        if kind != "extend":
            return client.memmap(rows(number), name)
        made = client.create_replay(name, row(), NUM_ROWS)
        made.extend(rows(number))
        return made

    make(BEFORE)
    with forked_clients.start("use_slowly", server.address, kind, name) as user:
        user.wait_stopped()
        client.delete(name)
        handle = make(AFTER)
        assert numbers_in(handle[:]) == [AFTER] * NUM_ROWS
        version = client.describe(name).version
        user.signal(signal.SIGCONT)
        said = user.line()
    if kind == "read":
        assert said == "found " + " ".join([str(AFTER)] * NUM_ROWS)
        return
    # It may make requests anew, like a client that connects now.
    assert said.startswith("done"), said
    assert numbers_in(handle[:]) == [LOST] * NUM_ROWS
    if kind == "extend":
        assert handle.info()["inserts"] == 2 * NUM_ROWS
    else:
        assert client.describe(name).version == version + 1


@pytest.mark.slow
@pytest.mark.parametrize("is_sample", [False, True])
def test_read_when_it_stands_still_in_the_middle_and_the_rows_are_written_then_it_is_whole(
    forked_clients: ForkedClients, server: tdserve.Server, other: tdserve.Client, is_sample: bool
) -> None:
    name = f"still-{is_sample}"
    handle: Any
    if is_sample:
        handle = other.create_replay(name, row(), NUM_ROWS)
        handle.extend(rows(BEFORE))
    else:
        handle = other.memmap(rows(BEFORE), name)
    with forked_clients.start("copy_slowly", server.address, name, is_sample) as reader:
        assert reader.line() == f"before {BEFORE}"
        reader.wait_stopped()
        if is_sample:
            handle.extend(rows(AFTER))
        else:
            handle[:] = rows(AFTER)
        reader.signal(signal.SIGCONT)
        assert reader.line() == f"found {AFTER}"


@pytest.mark.slow
def test_server_when_its_root_is_in_memory_then_as_on_disk() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tdserve-test-") as root,
        tdserve.Server(root, port=0) as server,
        server.client(transport="shm") as client,
    ):
        replay = client.create_replay("r", row("text"), 2 * NUM_ROWS)
        for number in range(5):
            replay.extend(rows(number, text="text"))
        assert set(numbers_in(replay.sample(100))) == {3, 4}
        handle = client.memmap(rows(BEFORE, text="text"), "td")
        handle[1:3] = rows(AFTER, 2, text="text")
        assert numbers_in(client.from_remote_init("td"))[:4] == [BEFORE, AFTER, AFTER, BEFORE]
        for number in range(6):
            client.publish("w", rows(number))
        found = client.latest("w", copy=False)
        assert found is not None
        assert numbers_in(found.data) == [5] * NUM_ROWS
        assert all(each["bytes_in"] == each["bytes_out"] == 0 for each in client.stats()["transports"].values())


@pytest.mark.slow
def test_rows_when_readers_and_writers_of_both_transports_meet_then_every_read_is_whole(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    num_writers, num_readers, num_writes = 4, 8, 20
    with tdserve.Server(tmp_path, port=0) as server, server.client(transport="shm") as client:
        client.memmap(rows(0, 24), "td")
        replay = client.create_replay("r", TensorDict({"content": rows(0, 1)[0]}, []), 64)
        replay.extend(TensorDict({"content": rows(0)}, [NUM_ROWS]))
        readers = [
            forked_clients.start(
                "watch", server.address, reader=n, until=num_writers * num_writes, transport="gloo" if n > 6 else "shm"
            )
            for n in range(num_readers)
        ]
        for reader in readers:
            assert reader.line() == "begins"
        writers = [
            forked_clients.start("exchange", server.address, writer=n, num_writes=num_writes)
            for n in range(num_writers)
        ]
        for writer in writers:
            assert writer.line() == f"wrote {num_writes}"
        for reader in readers:
            assert int(reader.line().split()[1]) > 0
        assert replay.info()["reserved_rows"] == 0
        assert torch.equal(replay[:]["content", "first"], replay[:]["content", "last"])


def test_map_when_given_arguments_of_a_function_without_one_then_refused(client: tdserve.Client, name: str) -> None:
    client.init_remote(TensorDict({"x": torch.zeros(2)}, [2]), name)
    with raises(tdserve.InvalidRequestError, argument="mode"):
        client[name].map(mode="r+")
