"""Stores with ``checksum=True``: every read of a damaged row is an error, never content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.errors import DamagedRowError, NotSupportedError, StoreExistsError
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 32
DAMAGED = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server on the disk: a root in memory is never synced."""
    with tdserve.Server(tmp_path_factory.mktemp("checksums") / "root", port=0) as started:
        yield started


@pytest.fixture(params=["gloo", "shm", "grpc"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param, timeout_s=60.0) as connected:
        yield connected
        for name in connected.stores():
            connected.delete(name)


def make_rows(*, with_text: bool, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + NUM_ROWS)
    rows = TensorDict({"x": numbers[:, None].expand(-1, 6).float(), "n": {"i": numbers}}, [NUM_ROWS])
    if with_text:
        rows["t"] = NonTensorStack(*(f"text {number}" for number in numbers.tolist()))
    return rows


def flip(server: tdserve.Server, path: str, at: int) -> None:
    """Flips a bit of a file that the server and its clients have mapped, as a bad disk or memory would."""
    with open(Path(server.config.root, "stores", path), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def make_table(client: tdserve.Client, rows: TensorDict, **options: Any) -> Any:
    """Makes a full table whose rows are synced before an extend is answered."""
    table = client.create_replay("table", rows[0], NUM_ROWS, checksum=True, durability="disk", **options)
    table.extend(rows)
    return table


@pytest.mark.slow
@pytest.mark.parametrize("with_text", [False, True])
def test_table_when_a_row_is_damaged_then_every_read_of_it_fails_and_others_go_on(
    server: tdserve.Server, client: tdserve.Client, with_text: bool
) -> None:
    rows = make_rows(with_text=with_text)
    table = make_table(client, rows)
    assert table.sample(64).batch_size == (64,)
    assert (table[DAMAGED]["x"] == DAMAGED).all()
    flip(server, "table/rows/x.memmap", 24 * DAMAGED + 2)
    with pytest.raises(DamagedRowError, match=r"row 5 of store 'table'.*tdserve check") as caught:
        table[DAMAGED]
    assert (caught.value.store, caught.value.row) == ("table", DAMAGED)
    with pytest.raises(DamagedRowError):
        table.sample(1000)
    with pytest.raises(DamagedRowError) as drawn:
        sample_again_and_again(table)
    assert drawn.value.fields == caught.value.fields
    assert bool(drawn.value.request_id) == bool(caught.value.request_id)  # where the log of the server names it too
    others = [number for number in range(NUM_ROWS) if number != DAMAGED]
    assert table[others]["n", "i"].tolist() == others
    table.extend(make_rows(with_text=with_text, start=100))  # written again, all are whole
    assert table.sample(64)["n", "i"].min() >= 100
    assert (table[DAMAGED]["x"] == 100 + DAMAGED).all()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 1000])  # over gloo, rows in the answer, and rows that the client waits for
def test_samples_when_every_second_row_is_damaged_then_as_many_fail_as_draw_one(
    server: tdserve.Server, client: tdserve.Client, width: int
) -> None:
    table = make_table(client, TensorDict({"x": torch.ones(NUM_ROWS, 4 * width)}, [NUM_ROWS]))
    assert table.sample(4 * NUM_ROWS).batch_size == (4 * NUM_ROWS,)  # from here on no request is needed
    for row in range(0, NUM_ROWS, 2):
        flip(server, "table/rows/x.memmap", 16 * width * row + 2)
    found = [read_damaged(lambda: table.sample(1)) for _ in range(600)]
    # Half of them; a quarter if another draw followed. Either is more than six standard deviations away.
    assert found.count(None) < 380
    assert all(row is None or row % 2 == 0 for row in found)
    table.extend(TensorDict({"x": torch.ones(NUM_ROWS, 4 * width)}, [NUM_ROWS]))
    assert table.sample(4 * NUM_ROWS).batch_size == (4 * NUM_ROWS,)


def read_damaged(read: Callable[[], Any]) -> int | None:
    """Reads; returns the damaged row that is reported, or None."""
    try:
        read()
    except DamagedRowError as error:
        return int(error.row)
    return None


@pytest.mark.slow
def test_batches_slices_and_taken_rows_when_rows_are_damaged_then_fail(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    rows = make_rows(with_text=True)
    table = make_table(client, rows)
    queue = client.create_queue("queue", rows[0], max_size=NUM_ROWS, checksum=True, durability="disk")
    queue.extend(rows)
    assert table.sample(64).batch_size == (64,)
    for row in range(NUM_ROWS):
        flip(server, "table/rows/x.memmap", 24 * row + 2)
        flip(server, "queue/rows/x.memmap", 24 * row + 2)
    with pytest.raises(DamagedRowError, match="of store 'table'"), table.batches(4, prefetch=2) as batches:
        next(batches)
    with pytest.raises(DamagedRowError, match="row 2 of store 'table'"):
        table[2:9]
    with pytest.raises(DamagedRowError, match="row 0 of store 'queue'"), queue.take(4):
        pytest.fail("damaged rows were given")
    wait_for(lambda: queue.info()["num_leased"] == 0, "the rows to be given back")
    with pytest.raises(DamagedRowError, match="row 0 of store 'queue'"), queue.batches(4) as taken:
        next(taken)
    wait_for(lambda: queue.info()["num_leased"] == 0, "the rows to be given back")
    queue.delete(list(range(4)))
    queue.extend(rows[:4])
    queue.delete(list(range(4, NUM_ROWS)))
    with queue.take(4) as whole:
        assert whole["n", "i"].tolist() == [0, 1, 2, 3]


def sample_again_and_again(table: Any) -> None:
    for _ in range(1000):
        table.sample(4)


def test_prioritized_table_when_a_row_is_damaged_then_samples_of_it_fail(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    table = make_table(client, make_rows(with_text=False), sampler=tdserve.Prioritized())
    flip(server, "table/rows/n/i.memmap", 8 * DAMAGED)
    with pytest.raises(DamagedRowError, match="row 5"):
        table.sample(1000)


@pytest.mark.slow
@pytest.mark.parametrize("part", [..., slice(2, 9), [DAMAGED, 1], DAMAGED, "x"])
def test_tensordict_when_a_row_is_damaged_then_every_read_of_it_fails(
    server: tdserve.Server, client: tdserve.Client, part: Any
) -> None:
    client.init_remote(make_rows(with_text=True), "td", checksum=True, durability="disk")
    store = client["td"]
    store[0] = make_rows(with_text=True)[0]  # the files of a small store come with its first use, and this syncs them
    assert store[...].batch_size == (NUM_ROWS,)
    flip(server, "td/rows/n/i.memmap", 8 * DAMAGED + 1)
    with pytest.raises(DamagedRowError, match="row 5 of store 'td'"):
        store[part]
    assert (store[DAMAGED + 1 :]["x"][:, 0] == torch.arange(DAMAGED + 1, NUM_ROWS)).all()
    store[DAMAGED] = make_rows(with_text=True)[7]
    assert store[DAMAGED]["n", "i"] == 7


def test_rows_when_overwritten_in_part_or_given_leaves_then_are_compared_as_they_are_now(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.init_remote(make_rows(with_text=False), "td", checksum=True, durability="disk")
    store = client["td"]
    store.set_at_("x", torch.full((6,), 0.5), 3)
    assert (store[3]["x"] == 0.5).all()
    store["y"] = torch.ones(NUM_ROWS)
    store.set_at_("y", torch.tensor(2.0), 4)  # the answer waits for a sync, which covers the new leaf
    assert store[...]["y"].sum() == NUM_ROWS + 1
    assert store[3]["n", "i"] == 3


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_tensordict_when_it_has_no_rows_then_compared_as_one(server: tdserve.Server, transport: TransportName) -> None:
    name = f"whole-{transport}"
    content = TensorDict(
        {"n": {"a": torch.arange(6.0).view(2, 3)}, "scalar": torch.tensor(5), "none": torch.ones(0, 2)}
    )
    with server.client(transport=transport, timeout_s=60.0) as client:
        client.init_remote(content.set_non_tensor("text", "kept"), name, checksum=True, durability="disk")
        store = client[name]
        store.set_("scalar", torch.tensor(6))  # the answer waits for a sync
        store["late"] = torch.ones(4)
        store.set_("scalar", torch.tensor(7))
        found = store.to_tensordict()
        assert (int(found["scalar"]), found["text"], found["late"].sum()) == (7, "kept", 4)
        assert torch.equal(found["n", "a"], content["n", "a"])
        assert torch.equal(store["n", "a"], content["n", "a"])
        flip(server, f"{name}/rows/n/a.memmap", 4)
        with pytest.raises(DamagedRowError, match="row 0"):
            store.to_tensordict()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_damage_when_the_row_was_read_before_the_first_sync_then_reported_at_once(
    server: tdserve.Server, transport: TransportName
) -> None:
    name = f"early-{transport}"
    with server.client(transport=transport, timeout_s=60.0) as client:
        client.init_remote(make_rows(with_text=False), name, checksum=True, durability="disk")
        store = client[name]
        assert store[DAMAGED]["n", "i"] == DAMAGED
        store[DAMAGED] = make_rows(with_text=False)[DAMAGED]  # the answer waits for the first sync of rows
        flip(server, f"{name}/rows/x.memmap", 24 * DAMAGED)
        with pytest.raises(DamagedRowError):
            _ = store[DAMAGED]


def test_mapping_when_of_a_store_with_checksums_then_compared_once_and_never_writable(server: tdserve.Server) -> None:
    with server.client(transport="shm", timeout_s=60.0) as client:
        client.init_remote(make_rows(with_text=False), "mapped", checksum=True, durability="disk")
        store = client["mapped"]
        store[0] = make_rows(with_text=False)[0]
        assert store.map()["n", "i"].tolist() == list(range(NUM_ROWS))
        with pytest.raises(NotSupportedError, match="checksum"):
            store.map(writable=True)
        flip(server, "mapped/rows/x.memmap", 24 * DAMAGED)
        with pytest.raises(DamagedRowError):
            store.map()


def test_store_when_it_has_checksums_then_its_description_has_it_and_a_plain_one_is_another(
    client: tdserve.Client,
) -> None:
    rows = make_rows(with_text=False)
    make_table(client, rows)
    assert client.describe("table").checksum
    client.create_replay("plain", rows[0], NUM_ROWS)
    assert not client.describe("plain").checksum
    with pytest.raises(StoreExistsError, match="checksum"):
        client.create_replay("plain", rows[0], NUM_ROWS, checksum=True, exists_ok=True)


@pytest.mark.slow
def test_doors_when_of_coroutines_or_of_several_servers_then_make_stores_that_are_compared(
    server: tdserve.Server, tmp_path: Path
) -> None:
    rows = make_rows(with_text=False)

    async def create() -> None:
        async with tdserve.aio.connect(server.address) as client:
            await client.create_replay("table", rows[0], NUM_ROWS, checksum=True)
            await client.create_queue("queue", rows[0], NUM_ROWS, checksum=True)
            await client.memmap(rows, "stored", checksum=True)

    asyncio.run(create())
    with tdserve.Server(tmp_path / "other", port=0) as other:
        addresses = f"{server.address},{other.address}"
        with tdserve.connect(addresses) as cluster, server.client() as client:
            assert all(client.describe(name).checksum for name in ("table", "queue", "stored"))
            for shards in (1, 2):
                cluster.create_replay(f"table-{shards}", rows[0], NUM_ROWS, checksum=True, shards=shards)
                cluster.create_queue(f"queue-{shards}", rows[0], NUM_ROWS, checksum=True, shards=shards)
                cluster.memmap(rows, f"stored-{shards}", checksum=True, shards=shards)
                for kind in ("table", "queue", "stored"):
                    assert cluster.describe(f"{kind}-{shards}").checksum
            cluster.create_replay("plain", rows[0], NUM_ROWS, shards=2)
            with pytest.raises(StoreExistsError, match="checksum"):
                cluster.create_replay("plain", rows[0], NUM_ROWS, checksum=True, shards=2, exists_ok=True)
            for name in cluster.stores():
                cluster.delete(name)


@pytest.mark.slow
def test_checksums_when_the_server_starts_again_then_are_compared(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with tdserve.Server(root, port=0) as server, server.client(transport="gloo") as client:
        make_table(client, make_rows(with_text=True))
        client.init_remote(make_rows(with_text=False), "small", checksum=True)
    with tdserve.Server(root, port=0) as server, server.client(transport="gloo") as client:
        flip(server, "table/rows/x.memmap", 24 * DAMAGED)
        with pytest.raises(DamagedRowError):
            client.replay("table").sample(1000)
        assert client["small"][3]["n", "i"] == 3
