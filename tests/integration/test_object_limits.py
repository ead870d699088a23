"""Room for non-tensor values: a limit per store, an error that changes nothing, and space that is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName
from tests.errors import raises
from tests.integration.conftest import FreshServer
from tests.processes import quiet_port, wait_for

pytestmark = pytest.mark.integration

LIMIT_BYTES = 2 << 20
TRANSPORTS = ("gloo", "shm")


def rows(text: str, num_rows: int = 4) -> TensorDict:
    """Rows with a text each, which starts with their number."""
    texts = NonTensorStack(*[f"{row}{text}" for row in range(num_rows)])
    return TensorDict({"x": torch.arange(num_rows) + len(text), "text": texts}, [num_rows])


def texts(td: TensorDict) -> list[str]:
    """The values."""
    found: list[str] = td["text"].tolist()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_store_when_its_values_are_full_then_the_write_changes_nothing_and_the_next_goes_on(
    server: tdserve.Server, name: str, transport: TransportName
) -> None:
    with server.client(transport=transport) as client:
        store = client.memmap(rows("a" * 200_000), name, max_object_bytes=LIMIT_BYTES)
        assert client.describe(name).max_object_bytes == LIMIT_BYTES
        before = store.to_tensordict()
        with pytest.raises(tdserve.CapacityError, match=name):
            store[:] = rows("b" * 600_000)
        assert texts(store.to_tensordict()) == texts(before)
        assert store["x"].tolist() == before["x"].tolist()
        for turn in range(10):  # what a write replaces makes room for the next one
            store[:] = rows("c" * (200_000 + turn))
        assert texts(store[2:]) == texts(rows("c" * 200_009)[2:])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replay_when_its_values_are_full_then_extend_is_refused_and_smaller_rows_go_in(
    server: tdserve.Server, name: str, transport: TransportName
) -> None:
    with server.client(transport=transport) as client:
        replay = client.create_replay(name, like=rows("a")[0], capacity=8, max_object_bytes=LIMIT_BYTES)
        with pytest.raises(tdserve.CapacityError, match=name):
            replay.extend(rows("b" * 600_000))
        assert len(replay) == 0
        for _ in range(10):
            replay.extend(rows("c" * 150_000))
        assert texts(replay[:]) == texts(rows("c" * 150_000)) * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["take", "delete", "clear", "max_times_sampled"])
def test_table_when_it_was_full_and_its_rows_have_left_then_others_go_in(
    server: tdserve.Server, name: str, transport: TransportName, how: str
) -> None:
    large = rows("a" * 300_000, num_rows=1)
    with server.client(transport=transport) as client:
        if how == "take":
            table: tdserve.ReplayHandle | tdserve.QueueHandle = client.create_queue(
                name, like=large[0], max_size=32, max_object_bytes=LIMIT_BYTES
            )
        else:
            most = 1 if how == "max_times_sampled" else 0
            table = client.create_replay(
                name, like=large[0], capacity=32, max_object_bytes=LIMIT_BYTES, max_times_sampled=most
            )
        for _ in range(3):
            index = fill(table, large)
            assert len(index) > 2
            if isinstance(table, tdserve.QueueHandle):
                for _ in index:
                    with table.take(1) as taken:
                        assert texts(taken) == texts(large)
            elif how == "delete":
                assert table.delete(index) == len(index)
            elif how == "clear":
                table.clear()
            else:
                table.sample(len(index))
            wait_for(lambda: len(table) == 0, "an empty table")  # a sample is over when the server has heard of it
        table.extend(rows("b" * 300_000, num_rows=2))
        assert len(table) == 2


def fill(table: tdserve.ReplayHandle | tdserve.QueueHandle, row: TensorDict) -> list[int]:
    """Extends until there is no room; returns the row numbers."""
    index: list[int] = []
    try:
        while len(index) < 32:
            index += table.extend(row).tolist()
    except tdserve.CapacityError:
        return index
    raise AssertionError("there is room without an end")


def test_limit_when_it_makes_no_sense_or_another_store_is_asked_for_then_is_refused(
    client: tdserve.Client, name: str
) -> None:
    with raises(tdserve.InvalidRequestError, argument="max_object_bytes"):
        client.init_remote(rows("a"), name, max_object_bytes=10)
    client.create_queue(name, like=rows("a")[0], max_size=4, max_object_bytes=LIMIT_BYTES)
    client.create_queue(name, like=rows("a")[0], max_size=4, exists_ok=True)
    with pytest.raises(tdserve.StoreExistsError, match="max_object_bytes"):
        client.create_queue(name, like=rows("a")[0], max_size=4, exists_ok=True, max_object_bytes=2 * LIMIT_BYTES)


def test_store_when_its_first_values_do_not_fit_then_nothing_is_created(client: tdserve.Client, name: str) -> None:
    with pytest.raises(tdserve.CapacityError, match=name):
        client.init_remote(rows("a" * 600_000), name, max_object_bytes=LIMIT_BYTES)
    assert name not in client
    client.init_remote(rows("a", num_rows=3), name)


def object_bytes(root: Path, name: str) -> int:
    """What the values of a store take on disk."""
    return sum(path.stat().st_blocks * 512 for path in (root / "stores" / name).glob("objects*/data.mdb"))


@pytest.mark.slow
def test_space_when_values_shrank_then_is_given_back_at_the_next_start_and_clients_read_on(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    port = quiet_port()
    server = fresh_server(root, port=port)
    with server.client(transport="shm", timeout_s=60.0) as client:
        store = client.memmap(rows("a" * 1_000_000), "big")
        other = client.memmap(rows("b" * 1_000_000), "full")
        store[:] = rows("small")
        assert texts(store[:]) == texts(rows("small"))
        before, full = object_bytes(root, "big"), object_bytes(root, "full")
        server.shutdown()
        again = tdserve.Server(root, port=port).start()
        try:
            assert before > 4_000_000 > 200_000 > object_bytes(root, "big")
            assert object_bytes(root, "full") == full
            assert texts(store[:]) == texts(rows("small"))
            store[1:2] = rows("new")[1:2]
            assert texts(store[:3]) == ["0small", "1new", "2small"]
            assert texts(other[3:]) == ["3" + "b" * 1_000_000]
            with again.client(transport="gloo") as remote:
                assert texts(remote["big"][:3]) == ["0small", "1new", "2small"]
        finally:
            again.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_store_when_deleted_and_made_again_then_its_values_are_never_the_old_ones(
    server: tdserve.Server, name: str, transport: TransportName
) -> None:
    with server.client(transport=transport) as reader, server.client() as writer:
        for turn in range(5):
            writer.init_remote(rows(f"turn {turn}"), name)
            assert texts(reader.from_remote_init(name)) == texts(rows(f"turn {turn}"))
            handle = reader[name]
            writer.delete(name)
            with pytest.raises(tdserve.StoreNotFoundError):
                handle[:]
