"""Leaves that tables get while others write and sample them, and while the server is killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import tdserve
import tdserve.aio
from tests.integration.checked_rows import MAX_NUMBERS, checked_ids, checked_rows, example
from tests.integration.conftest import FreshServer
from tests.integration.crashing import Crashing, Writer

pytestmark = pytest.mark.integration

CHANNEL_FLOATS = 20_000
"""Of a row, so that content goes over the channel."""

OWN = 50
"""Number of the writer whose rows have the leaves that come later; others do not know them."""


@pytest.fixture(params=["gloo", "shm"])
def other(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Another client of the shared server, over either transport."""
    with server.client(transport=request.param, timeout_s=20.0) as connected:
        yield connected


def rows(*numbers: int, **more: Any) -> TensorDict:
    """Rows that show their number."""
    number = torch.tensor(numbers)
    return TensorDict({"x": number.float(), "n": {"y": number, **more}}, [len(numbers)])


def row(**more: Any) -> TensorDict:
    """A row, for its structure."""
    return TensorDict({"x": torch.tensor(0.0), "n": {"y": torch.tensor(0), **more}}, [])


def folder_of(client: tdserve.Client, name: str) -> Path:
    """The folder of a store."""
    return Path(client.stats()["root"]) / client.describe(name).path


def with_leaves(td: TensorDict, num_leaves: int) -> TensorDict:
    """Checked rows with so many additional leaves, whose content follows from the rows' numbers."""
    for leaf in range(num_leaves):
        td[f"z{leaf}"] = (td["number"] + 1 + leaf)[:, None].expand(-1, 3).contiguous()
    return td


def check_rows(td: Any) -> int:
    """Checks that each row is whole, with all later leaves or without them; returns how many such leaves there are."""
    ids = checked_ids(td) if len(td) else np.zeros(0, np.int64)
    is_own, number = torch.from_numpy(ids // MAX_NUMBERS == OWN), torch.from_numpy(ids % MAX_NUMBERS)
    leaves = [key for key in td.keys() if key.startswith("z")]  # noqa: SIM118 (a tensordict's keys)
    for key in leaves:
        value = td[key]
        assert bool((value == value[:, :1]).all()), "a torn row"
        is_set = value[:, 0] != 0
        assert not bool((is_set & ~is_own).any()), "a row of a writer that does not know the leaf has something there"
        assert torch.equal(value[:, 0][is_set], (number + 1 + int(key[1:]))[is_set])
    return len(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replay", "queue"])
def test_leaves_when_a_table_gets_them_then_every_handle_reads_and_writes_them(
    client: tdserve.Client, other: tdserve.Client, name: str, kind: str
) -> None:
    mine: Any = client.create_replay(name, row(), 6) if kind == "replay" else client.create_queue(name, row(), 6)
    theirs: Any = other.replay(name) if kind == "replay" else other.queue(name)
    theirs.extend(rows(0, 1))
    batch = rows(2, 3, z=torch.ones(2, 3))
    with pytest.raises(tdserve.SpecMismatchError, match=r"'z'.*add_leaves\(like=row\)"):
        mine.extend(batch)
    mine.add_leaves(batch[0])
    mine.add_leaves(batch[0])
    mine.extend(batch)
    theirs.add_leaves(batch[0])  # which has them
    theirs.extend(rows(4, 5))
    for handle in (mine, theirs, pickle.loads(pickle.dumps(theirs))):
        assert handle[:]["n", "z"].tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
        assert handle.spec == mine.spec
    assert theirs.info()["num_incomplete"] == 0
    if client.transport == "shm":
        plain = TensorDict.load_memmap(folder_of(client, name) / "rows", allow_pickle=False)
        assert plain["n", "z"].sum(1).tolist() == [0.0, 0.0, 3.0, 3.0, 0.0, 0.0]
    theirs.set_at_(("n", "z"), torch.full((3,), 7.0), torch.tensor([0]))
    assert mine[0]["n", "z"].tolist() == [7.0] * 3
    if kind == "queue":
        with theirs.take(6) as taken:
            assert taken["n", "z"].sum(1).tolist() == [21.0, 0.0, 3.0, 3.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        lambda handle: handle.sample(64),
        lambda handle: handle[:],
        lambda handle: handle[torch.arange(4)],
        lambda handle: handle.sample(64, require=("x",)),
        lambda handle: handle.sample(64, require=[("n", "z")]),
        lambda handle: handle.sample(2, rank=0, world_size=2, balance=("n", "y")),
        lambda handle: handle.extend(rows(2, z=torch.zeros(1))) is None or handle[:],
        lambda handle: (
            handle.extend({"x": np.zeros(1, np.float32), "n": {"y": np.zeros(1, int), "z": np.zeros(1)}}) is None
            or handle[:]
        ),
        lambda handle: handle.set_at_(("n", "z"), torch.zeros(2), torch.arange(2)) or handle[:],
        lambda handle: handle.sample(2, rank=0, world_size=2),
        lambda handle: handle.take(4, consumer="c", ack=False),
        lambda handle: (
            handle.set_at_("n", rows(0, 1, 2, 3, z=torch.zeros(4, dtype=torch.float64))["n"], torch.arange(4))
            or handle[:]
        ),
    ],
)
def test_handle_when_leaves_have_come_then_its_next_call_has_them(
    client: tdserve.Client, other: tdserve.Client, name: str, use: Callable[[Any], Any]
) -> None:
    mine = client.create_replay(name, row(), 8)
    theirs = other.replay(name)
    mine.extend(rows(0, 1, 2, 3))
    theirs.sample(4)
    theirs[:]
    mine.add_leaves(row(z=torch.tensor(0.0, dtype=torch.float64)))
    found = use(theirs)
    assert not found["n", "z"].any()
    assert set(found["n", "y"].tolist()) <= {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin",
    [
        lambda handle: handle.batches(8),
        lambda handle: handle.batches(4, rank=0, world_size=2),
        lambda handle: handle.batches(2, consumer="c"),
        None,
    ],
)
def test_iterator_when_leaves_come_then_goes_on_with_them(
    client: tdserve.Client, other: tdserve.Client, name: str, begin: Callable[[Any], Any] | None
) -> None:
    mine: Any = client.create_queue(name, row(), 64) if begin is None else client.create_replay(name, row(), 64)
    mine.extend(rows(*range(64)))
    with other.queue(name).batches(2) if begin is None else begin(other.replay(name)) as batches:
        assert ("n", "z") not in next(batches).keys(True)
        mine.add_leaves(row(z=torch.tensor(0.0)))
        while ("n", "z") not in (batch := next(batches)).keys(True):
            pass  # some were requested before
        assert not batch["n", "z"].any()


def test_leaves_when_they_are_values_then_rows_before_have_none(
    client: tdserve.Client, other: tdserve.Client, name: str
) -> None:
    mine = client.create_replay(name, row(text="a", tags="b"), 8)
    theirs = other.replay(name)
    theirs.extend(rows(0, 1, text="old", tags="t"))
    mine.add_leaves(row(more="", ragged=torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)[0]))
    mine.extend(rows(2, 3, text="new", tags="u", more="m", ragged=torch.zeros(2, 2)))
    theirs.extend(rows(4, text="last", tags="v"))
    for handle in (mine, theirs):
        found = handle[:]["n"]
        assert [found[number]["text"] for number in range(5)] == ["old", "old", "new", "new", "last"]
        assert [found[number]["more"] for number in range(5)] == [None, None, "m", "m", None]
    assert theirs.info()["num_incomplete"] == 0


def test_leaves_when_given_as_arrays_or_awaited_then_the_same(server: tdserve.Server, name: str) -> None:
    like = {"x": np.float32(0), "n": {"y": np.int64(0)}}
    with server.client(numpy=True) as client:
        replay = client.create_replay(name, like, 8)
        replay.extend({"x": np.zeros(2, np.float32), "n": {"y": np.arange(2)}})
        replay.add_leaves({"z": np.zeros(3, np.float32)})
        assert replay[np.arange(2)]["z"].tolist() == [[0.0] * 3] * 2

        async def add() -> Any:
            async with await tdserve.aio.connect(server.address) as awaited:
                handle = await awaited.replay(name)
                await handle.add_leaves({"w": np.int16(0)})
                return await handle.sample(4)

        assert set(asyncio.run(add()).keys()) >= {"x", "n", "z", "w"}
        assert set(replay.sample(4)) >= {"x", "n", "z", "w"}
        client.delete(name)


@pytest.mark.parametrize(
    ("like", "error", "match"),
    [
        (rows(0, 1, z=torch.zeros(2)), tdserve.SpecMismatchError, "batch size"),
        (row(z=torch.tensor(0)).set(("x2", "index"), torch.tensor(0)).set("index", torch.tensor(0)), None, "index"),
        (TensorDict({"x": {"deep": torch.tensor(0)}}), tdserve.SpecMismatchError, "'x'"),
    ],
)
def test_leaves_when_rows_cannot_have_them_then_refused_by_name(
    client: tdserve.Client, name: str, like: Any, error: type[Exception] | None, match: str
) -> None:
    replay = client.create_replay(name, row(), 8)
    replay.extend(rows(0))
    with pytest.raises(error or tdserve.InvalidSpecError, match=match):
        replay.add_leaves(like)
    assert replay.sample(1)["n"].keys() == {"y"}


@pytest.mark.slow
def test_workers_of_a_loader_when_leaves_come_then_read_them(server: tdserve.Server, name: str) -> None:
    with server.client() as client:
        replay = client.create_replay(name, row(), 8)
        replay.extend(rows(*range(8)))
        dataset: Any = replay
        loader: Any = DataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=lambda batch: batch, multiprocessing_context="fork"
        )
        client.replay(name).add_leaves(row(z=torch.tensor(0.0)))
        assert [batch["n", "z"].tolist() for batch in loader] == [[0.0] * 4] * 2
        client.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("num_floats", [8, CHANNEL_FLOATS])
@pytest.mark.parametrize("way", ["extend", "early", "writer"])
def test_leaves_when_others_write_and_sample_then_no_row_is_lost_or_torn(
    client: tdserve.Client, other: tdserve.Client, name: str, way: str, num_floats: int
) -> None:
    capacity, num_rows = 512 if num_floats == 8 else 96, 16 if num_floats == 8 else 4
    mine = client.create_replay(name, example(num_floats), capacity)
    mine.extend(checked_rows(0, 0, num_rows, num_floats))
    is_over = Event()

    def write() -> int:
        theirs, start, futures = other.replay(name), 0, []
        with theirs.writer(batch=num_rows) as writer:
            while not is_over.is_set() or start < 64:
                batch = checked_rows(1, start, num_rows, num_floats)
                if way == "writer":
                    for each in batch:
                        writer.append(each)
                else:
                    futures.append(theirs.extend(batch, return_early=way == "early"))
                start += num_rows
        if way == "early":
            assert all(len(future.result()) == num_rows for future in futures)
        return start

    def sample() -> int:
        theirs, most = other.replay(name), 0
        with theirs.batches(num_rows, prefetch=2) as batches:
            while not is_over.is_set() or most < 4:
                most = max(most, *(check_rows(found) for found in (next(batches), theirs.sample(num_rows), theirs[:])))
        return most

    with ThreadPoolExecutor(2) as pool:
        writing, sampling = pool.submit(write), pool.submit(sample)
        try:
            num_own = 0
            for num_leaves in range(1, 5):
                mine.add_leaves(with_leaves(checked_rows(OWN, 0, 1, num_floats), num_leaves)[0])
                for _ in range(4):
                    mine.extend(with_leaves(checked_rows(OWN, num_own, num_rows, num_floats), num_leaves))
                    num_own += num_rows
        finally:
            is_over.set()
        assert sampling.result(60.0) == 4
        num_theirs = writing.result(60.0)
    assert mine.info()["inserts"] == num_rows + num_own + num_theirs
    assert mine.info()["num_incomplete"] == mine.info()["reserved_rows"] == 0


@pytest.mark.slow
@pytest.mark.once("shm")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_leaves_when_the_server_is_killed_at_any_moment_then_whole_or_absent(tmp_path: Path, transport: str) -> None:
    with Crashing(tmp_path) as crashing:
        client = crashing.server.client(transport=transport, timeout_s=60.0)
        replay = client.create_replay("x", example(8), 1 << 14)
        other = client.replay("x")

        def write(number: int) -> None:
            replay.add_leaves(with_leaves(checked_rows(OWN, 0, 1, 8), number // 2)[0])
            replay.extend(with_leaves(checked_rows(OWN, 2 * number, 2, 8), number // 2))

        writer = Writer(write)
        bystander = Writer(lambda number: other.extend(checked_rows(1, number, 1, 8)))
        for _ in range(3):
            writer.goes_on()
            bystander.goes_on()
            crashing.restart()
        writer.goes_on()
        numbers, others = writer.end(), bystander.end()
        client.close()
        crashing.restart()
        with crashing.server.client(transport=transport) as again:
            found = again.replay("x")[:]
            assert check_rows(found) == numbers[-1] // 2
            ids = checked_ids(found).tolist()
            assert sorted(ids) == sorted(
                [OWN * MAX_NUMBERS + 2 * each + row for each in numbers for row in (0, 1)]
                + [MAX_NUMBERS + each for each in others]
            )
            for number in (numbers[0], numbers[-1]):
                own = found[ids.index(OWN * MAX_NUMBERS + 2 * number)]
                assert [bool(own[f"z{leaf}"].any()) for leaf in range(numbers[-1] // 2)] == [
                    leaf < number // 2 for leaf in range(numbers[-1] // 2)
                ]
            assert not list(folder_of(again, "x").glob("altering-*"))


@pytest.mark.slow
def test_leaves_when_the_data_worker_is_killed_then_they_come_all_the_same(fresh_server: FreshServer) -> None:
    server = fresh_server()
    with server.client(transport="gloo", timeout_s=60.0) as client:
        replay = client.create_replay("x", example(8), 1 << 12)

        def write(number: int) -> None:
            replay.add_leaves(with_leaves(checked_rows(OWN, 0, 1, 8), number)[0])
            replay.extend(with_leaves(checked_rows(OWN, number, 1, 8), number))

        writer = Writer(write)
        for _ in range(2):
            writer.goes_on()
            (worker,) = client.catalog.get_server_stats().workers
            os.kill(worker.pid, signal.SIGKILL)
        writer.goes_on()
        numbers = writer.end()
        found = replay[:]
        assert check_rows(found) == numbers[-1]
        assert found["number"].tolist() == numbers
