"""Stores with ``checksum=True``: whatever happens to it, a damaged row stays damaged until it is written as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import DamagedRowError
from tdserve.server.checking.root_check import check_root

pytestmark = pytest.mark.integration

DAMAGED_ROW = "row 5 of store 'store'"

NUM_ROWS, WIDTH, DAMAGED = 16, 8, 5
TRANSPORTS: tuple[TransportName, ...] = ("shm", "gloo", "grpc")

CHANGES: dict[str, Callable[[Any], Any]] = {
    "store[key] =": lambda store: store.set("new", torch.ones(NUM_ROWS)),
    "rename_key_": lambda store: store.rename_key_("n", "m"),
    "del_": lambda store: store.del_("n"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def server(root: Path) -> Iterator[tdserve.Server]:
    with tdserve.Server(root, port=0) as started:
        yield started


def make_rows(start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + NUM_ROWS)
    content = {"n": numbers, "x": numbers[:, None].expand(-1, WIDTH).float(), "score": torch.zeros(NUM_ROWS)}
    rows = TensorDict(content, [NUM_ROWS])
    rows["t"] = NonTensorStack(*(f"text {number}" for number in numbers.tolist()))
    return rows


def make_store(client: tdserve.Client, kind: str) -> Any:
    """Makes a store with synced rows. Later writes are synced before they are answered."""
    rows = make_rows()
    if kind == "tensordict":
        client.init_remote(rows, "store", checksum=True, durability="disk")
        client["store"][0] = rows[0]  # the files of a small store come with its first use, and this syncs them
        return client["store"]
    sampler = tdserve.Prioritized() if kind == "prioritized" else None
    table = client.create_replay("store", rows[0], NUM_ROWS, sampler=sampler, checksum=True, durability="disk")
    table.extend(rows)
    return table


def damage(root: Path, *rows: int) -> None:
    """Flips a bit of some rows in a file that the server has mapped, as a bad disk or memory would."""
    with open(root / "stores/store/rows/x.memmap", "r+b") as file:
        for row in rows:
            file.seek(4 * WIDTH * row + 2)
            byte = file.read(1)[0]
            file.seek(4 * WIDTH * row + 2)
            file.write(bytes([byte ^ 4]))


def check_damaged(server: tdserve.Server, kind: str, row: int = DAMAGED) -> None:
    """Asserts that a row is damaged for readers over every transport."""
    for transport in TRANSPORTS:
        with server.client(transport=transport, timeout_s=60.0) as client:
            store = client["store"] if kind == "tensordict" else client.replay("store")
            with pytest.raises(DamagedRowError, match=f"row {row} of store 'store'"):
                pytest.fail(f"{transport}: {store[row]}")


def write_again(store: Any, kind: str, row: TensorDict) -> None:
    """Replaces the damaged row."""
    if kind == "tensordict":
        store[DAMAGED] = row[0]
    else:
        store.delete([DAMAGED])
        store.extend(row)


def list_damaged(root: Path) -> list[int]:
    """Returns the damaged rows that ``tdserve check`` names, after the end of the server."""
    found = check_root(root, repairs=False).findings
    return [row for finding in found for row in finding.rows or ()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["tensordict", "table", "prioritized"])
def test_rows_when_damaged_and_written_in_part_then_the_write_fails_and_they_stay_damaged(
    root: Path, server: tdserve.Server, transport: TransportName, kind: str
) -> None:
    with server.client(transport=transport, timeout_s=60.0) as client:
        store = make_store(client, kind)
        damage(root, DAMAGED, DAMAGED + 1)
        for key, value in (("score", torch.tensor(1.0)), ("n", torch.tensor(7)), ("t", "other")):
            with pytest.raises(DamagedRowError, match=DAMAGED_ROW):
                store.set_at_(key, value, DAMAGED)
        with pytest.raises(DamagedRowError):  # whole or not at all
            store.set_at_("score", torch.ones(4), list(range(DAMAGED - 3, DAMAGED + 1)))
        store.set_at_("score", torch.tensor(2.0), 3)  # this syncs the store
        assert store[:DAMAGED]["score"].tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]
        check_damaged(server, kind)
        write_again(store, kind, make_rows(100)[:1])
        assert store[DAMAGED]["x"].tolist() == [100.0] * WIDTH
        store.set_at_("score", torch.tensor(3.0), DAMAGED)
        assert store[DAMAGED]["score"] == 3.0
        check_damaged(server, kind, DAMAGED + 1)
    server.shutdown()
    assert list_damaged(root) == [DAMAGED + 1]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_parts_of_rows_when_of_two_batch_dimensions_then_compared_before_a_write(
    root: Path, server: tdserve.Server, transport: TransportName
) -> None:
    with server.client(transport=transport, timeout_s=60.0) as client:
        content = TensorDict({"x": torch.ones(NUM_ROWS, WIDTH)}, [NUM_ROWS, WIDTH])
        client.init_remote(content, "store", checksum=True, durability="disk")
        store = client["store"]
        store[0] = content[0]
        damage(root, DAMAGED)
        with pytest.raises(DamagedRowError, match="row 5"):
            store[DAMAGED, 3] = content[0, 0]
        store[DAMAGED] = content[0]
        assert store[DAMAGED]["x"].tolist() == [1.0] * WIDTH


@pytest.mark.parametrize("change", CHANGES)
def test_keys_when_a_row_is_damaged_then_stay_as_they_are_until_it_is_written(
    root: Path, server: tdserve.Server, change: str
) -> None:
    with server.client(transport="gloo", timeout_s=60.0) as client:
        store = make_store(client, "tensordict")
        damage(root, DAMAGED)
        with pytest.raises(DamagedRowError, match=DAMAGED_ROW):
            CHANGES[change](store)
        assert sorted(store.keys()) == ["n", "score", "t", "x"]
        store[3] = make_rows()[3]  # this syncs the store
        check_damaged(server, "tensordict")
        store[DAMAGED] = make_rows()[DAMAGED]
        CHANGES[change](store)
        assert store[DAMAGED]["x"].tolist() == [float(DAMAGED)] * WIDTH
    server.shutdown()
    assert list_damaged(root) == []


def test_leaves_when_a_row_is_damaged_then_come_to_the_table_once_it_is_written(
    root: Path, server: tdserve.Server
) -> None:
    with server.client(transport="gloo", timeout_s=60.0) as client:
        table = make_store(client, "table")
        damage(root, DAMAGED)
        like = make_rows()[0].set("z", torch.zeros(()))
        with pytest.raises(DamagedRowError, match=DAMAGED_ROW):
            table.add_leaves(like=like)
        check_damaged(server, "table")
        write_again(table, "table", make_rows()[DAMAGED : DAMAGED + 1])
        table.add_leaves(like=like)
        assert table[DAMAGED]["x"].tolist() == [float(DAMAGED)] * WIDTH
    server.shutdown()
    assert list_damaged(root) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lock_when_rows_are_damaged_then_none_becomes_whole(
    root: Path, server: tdserve.Server, transport: TransportName
) -> None:
    with server.client(transport=transport, timeout_s=60.0) as client:
        store = make_store(client, "tensordict")
        with store.lock_():
            damage(root, DAMAGED)
            assert store[3]["n"] == 3
            with pytest.raises(DamagedRowError, match="row 5"):
                store[DAMAGED]
        check_damaged(server, "tensordict")
        store[3] = make_rows()[3]  # this syncs the store
        check_damaged(server, "tensordict")
    server.shutdown()
    assert list_damaged(root) == [DAMAGED]


def test_table_when_it_gets_its_first_row_in_part_then_damaged_rows_stay_damaged(
    root: Path, server: tdserve.Server
) -> None:
    with server.client(transport="shm", timeout_s=60.0) as client:
        table = make_store(client, "table")
        damage(root, DAMAGED)
        first = TensorDict({"n": torch.tensor([50])}, [1])
        table.extend(first)  # replaces row 0, and moves what each row has into a column
        check_damaged(server, "table")
        assert table[7]["x"].tolist() == [7.0] * WIDTH
    server.shutdown()
    assert list_damaged(root) == [DAMAGED]
