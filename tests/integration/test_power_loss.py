"""The content after a loss of power, for any subset of the pages that were written since the last sync."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdserve
from tdserve.server.durability.power_loss import recover
from tdserve.store.roots.root import Root
from tdserve.store.values.entry_tables import EntryTables
from tdserve.store.values.objects import Objects
from tdserve.store.weights.version_marks import FILE_NAME, find_whole_versions
from tests.integration.power import Choose, compose, copy_root
from tests.processes import is_gone, wait_for

pytestmark = pytest.mark.integration

ITEMS = 1500
"""Size of a row, nearly three pages, so that it can be torn."""

NUM_ROWS = 40

ENTRIES = [f"{number:04}" for number in range(200)]
"""Keys, which are also the values."""


def rows(first: int, num_rows: int = NUM_ROWS) -> TensorDict:
    """Returns rows with one number each, which a string repeats, so that a torn row shows."""
    numbers = torch.arange(first, first + num_rows)
    texts = [f"{number:05d}" * 100 for number in numbers.tolist()]
    xs = numbers[:, None].repeat(1, ITEMS)
    stacked: TensorDict = TensorDict.maybe_dense_stack(
        [TensorDict({"x": x, "text": text}, []) for x, text in zip(xs, texts, strict=True)]
    )
    return stacked


def numbers_of(found: Any) -> list[int]:
    """Returns the number of each row; fails if a row is torn."""
    x = found["x"]
    assert (x == x[..., :1]).all(), "a row is torn"
    numbers: list[int] = x[:, 0].tolist()
    assert found["text"] == [f"{number:05d}" * 100 for number in numbers], "a row has the value of another moment"
    return numbers


class Moments(NamedTuple):
    """Copies of one root: at its last full sync and at the end."""

    early: Path
    late: Path


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moments]:
    folder = tmp_path_factory.mktemp("power")
    root, made = folder / "root", Moments(folder / "early", folder / "late")
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        write_synced(client)
    server.start()  # an orderly end syncs everything
    copy_root(root, made.early)
    with server.client() as client, server.client(transport="gloo") as remote:
        write_unsynced(client, remote)
        os.kill(server.pid, signal.SIGKILL)
        pid = server.pid
        wait_for(lambda: is_gone(pid) or None, "the end of the server")
    server.shutdown()
    copy_root(root, made.late)
    yield made
    server.shutdown()


def write_synced(client: tdserve.Client) -> None:
    """Writes content that must survive."""
    row = rows(0, 1)[0]
    client.create_replay("table", like=row, capacity=100).extend(rows(0))
    queue = client.create_queue("queue", like=row, max_size=100)
    queue.extend(rows(0))
    with queue.take(10):
        pass
    client.create_replay("disk table", like=row, capacity=100, durability="disk").extend(rows(0))
    client.memmap(TensorDict({"x": rows(0)["x"]}, [NUM_ROWS]), "rows")
    client.memmap(TensorDict({"x": rows(0)["x"]}, [NUM_ROWS]), "disk rows", durability="disk")
    client.memmap(TensorDict({"x": rows(0)["x"], "note": NonTensorData("kept")}, []), "whole")
    client.memmap_like(TensorDict({"x": rows(0)["x"][0]}, []), "blank", batch_size=[NUM_ROWS])
    client.memmap(TensorDict({"x": torch.zeros(3)}, []), "deleted")
    for name in ("small", "small and used"):
        client.init_remote(TensorDict({"x": torch.arange(3)}, []), name)
    client.create_kv("entries").put(ENTRIES, ENTRIES)
    for number in range(3):
        client.publish("policy", TensorDict({"w": torch.full((100_000,), number)}, []))


def write_unsynced(client: tdserve.Client, remote: tdserve.Client) -> None:
    """Writes content that may be lost, except in stores of durability "disk"."""
    table = client.replay("table")
    table.extend(rows(100))
    table.extend(rows(200))  # overwrites the oldest twenty
    remote.queue("queue").extend(rows(100))
    with client.queue("queue").take(5):
        pass
    remote["rows"][:5] = TensorDict({"x": rows(100, 5)["x"]}, [5])
    client["rows"][5:10] = TensorDict({"x": rows(100, 5)["x"]}, [5])
    client["whole"].set("x", rows(100)["x"])
    client["blank"][3] = TensorDict({"x": rows(100, 1)["x"][0]}, [])
    client.memmap(TensorDict({"x": torch.zeros(10 * ITEMS)}, []), "later")  # too large for the catalog
    client.delete("deleted")
    assert client["small and used"]["x"].tolist() == [0, 1, 2]
    entries = client.kv("entries")
    entries.put([*ENTRIES[5:], "later"], [f"other {key}" for key in [*ENTRIES[5:], "later"]])
    entries.delete(ENTRIES[:5])
    for number in range(10, 20):
        client.publish("policy", TensorDict({"w": torch.full((100_000,), number)}, []))
    client.publish("later policy", TensorDict({"w": torch.zeros(3)}, []))
    for writer, first in ((client, 100), (remote, 150)):
        writer.replay("disk table").extend(rows(first, 10))
    client["disk rows"][:5] = TensorDict({"x": rows(100, 5)["x"]}, [5])
    remote["disk rows"][5:10] = TensorDict({"x": rows(200, 5)["x"]}, [5])


SYNCED = ("synced/", "run.json", "stores/disk table/", "stores/disk rows/")
"""Files that the last acknowledged write to a store of durability "disk" has brought to the disk."""


def any_of(seed: int) -> Choose:
    chance = random.Random(seed)
    return lambda _name, _page, _num_pages: chance.random() < 0.5


ANY = {f"pages by chance, {seed}": any_of(seed) for seed in range(12)}

NUM_BY_CHANCE = 4

BY_CHANCE = [
    *list(ANY)[:NUM_BY_CHANCE],
    *(pytest.param(state, marks=pytest.mark.full) for state in list(ANY)[NUM_BY_CHANCE:]),
]

STATES: dict[str, Choose] = {
    "nothing": lambda _name, _page, _num_pages: False,
    "everything": lambda _name, _page, _num_pages: True,
    "first pages": lambda _name, page, _num_pages: page < 2,
    "all but first pages": lambda _name, page, _num_pages: page >= 2,
    "every second page": lambda _name, page, _num_pages: page % 2 == 0,
    "all but the last half": lambda _name, page, num_pages: page < num_pages // 2,
    "generations and no content": lambda name, _page, _num_pages: "rows/" not in name,
    "content and no generations": lambda name, _page, _num_pages: "generation" not in name,
    "the catalog alone": lambda name, _page, _num_pages: name.startswith("catalog"),
    "all but the catalog": lambda name, _page, _num_pages: not name.startswith("catalog"),
}

SERVED = ("everything", "content and no generations", "every second page")
"""Cases for which a server is started; for all other cases the test reads the files."""


def composed(moments: Moments, target: Path, reached: Choose) -> Path:
    """Composes a root. Synced content has reached the disk; the case says how much of the rest has."""
    compose(
        moments.early,
        moments.late,
        target,
        lambda name, page, num_pages: name.startswith(SYNCED) or reached(name, page, num_pages),
    )
    return target


@pytest.mark.slow
@pytest.mark.parametrize("state", [*STATES, *BY_CHANCE])
def test_recover_when_the_power_was_lost_then_rows_that_count_are_whole_and_those_synced_are_there(
    moments: Moments, tmp_path: Path, state: str
) -> None:
    folder = composed(moments, tmp_path / "root", {**STATES, **ANY}[state])
    root = Root.acquire(folder)
    try:
        for _ in range(2):  # a crash in the middle: repaired once more
            recover(root)
            whole = {name: whole_rows(folder, name) for name in ("table", "queue", "disk table", "rows", "disk rows")}
            assert set(range(20, NUM_ROWS)) <= set(whole["table"]) <= set(range(NUM_ROWS))
            assert set(whole["queue"]) == set(range(10, NUM_ROWS))
            assert sorted(whole["disk table"]) == [*range(NUM_ROWS), *range(100, 110), *range(150, 160)]
            assert set(range(10, NUM_ROWS)) <= set(whole["rows"]) <= set(range(NUM_ROWS))
            assert whole["disk rows"] == [*range(100, 105), *range(200, 205), *range(10, NUM_ROWS)]
            assert read_entries(folder) == {key: f"\0\xa4{key}" for key in ENTRIES}  # MessagePack
            versions = folder / "stores/policy/versions"
            assert 3 in find_whole_versions(versions, uid=json.loads((versions / FILE_NAME).read_bytes())["uid"])
    finally:
        root.release()


def read_entries(root: Path) -> dict[str, str]:
    """Returns the records of the entries that exist after a repair, by key."""
    folder = root / "stores/entries"
    with Objects(folder / "objects") as objects:
        tables = EntryTables.open(objects, folder)
        assert tables is not None
        keys = tables.list_keys(b"", b"", -1, 0)
        records = tables.find(keys, 0).records
    return {key.decode(): record.decode("latin-1") for key, record in zip(keys, records, strict=True)}


def whole_rows(root: Path, name: str) -> list[int]:
    """Returns the numbers of the rows that exist after a repair; each must be whole."""
    folder = root / "stores" / name
    generations = np.fromfile(folder / "generation.memmap", "<i8", offset=4096)[:-1]
    found = np.flatnonzero((generations & 1 == 0) & (generations > 0))
    x = np.fromfile(folder / "rows/x.memmap", "<i8").reshape(len(generations), ITEMS)[found]
    assert (x == x[:, :1]).all(), "a row is torn"
    numbers: list[int] = x[:, 0].tolist()
    if (folder / "objects").exists():
        with Objects(folder / "objects") as objects:
            (values,) = objects.get_many([(("text",), found)])
        for number, value in zip(numbers, values.values, strict=True):
            assert value is not None
            assert f"{number:05d}" * 100 in bytes(value).decode(errors="replace"), "the value of another moment"
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("state", [*(pytest.param(state, marks=pytest.mark.full) for state in SERVED[:-1]), SERVED[-1]])
def test_server_when_the_power_was_lost_then_what_was_synced_is_there_and_nothing_torn(
    moments: Moments, tmp_path: Path, state: str
) -> None:
    composed(moments, tmp_path / "root", STATES[state])
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        check_tables(client)
        check_rows(client)
        check_weights(client)
        if "later" in client:  # its rows had not reached the disk, but the store's existence had
            with pytest.raises(tdserve.CorruptDataError, match="when the power was lost"):
                client["later"].to_tensordict()
            client.delete("later")
        client.memmap(TensorDict({"x": torch.ones(ITEMS)}, []), "later")


def check_tables(client: tdserve.Client) -> None:
    found = numbers_of(client.replay("table")[:])
    assert set(range(20, NUM_ROWS)) <= set(found) <= set(range(NUM_ROWS)), "the newest of what was synced"
    assert len(found) == len(set(found))
    found = numbers_of(client.queue("queue")[:])
    assert set(found) == set(range(10, NUM_ROWS)), "those that had been acknowledged before are gone"
    found = numbers_of(client.replay("disk table")[:])
    assert sorted(found) == [*range(NUM_ROWS), *range(100, 110), *range(150, 160)]


def check_rows(client: tdserve.Client) -> None:
    disk = client["disk rows"][:]["x"]
    assert disk[:, 0].tolist() == [*range(100, 105), *range(200, 205), *range(10, NUM_ROWS)]
    assert (disk == disk[:, :1]).all()
    check_rewritable(client, "rows", damaged=range(10), expected=list(range(NUM_ROWS)))
    for name in ("small", "small and used"):
        assert client[name]["x"].tolist() == [0, 1, 2]
    check_rewritable(client, "blank", damaged=range(3, 4), expected=[0] * NUM_ROWS)
    try:
        whole = client["whole"].to_tensordict()
        assert torch.equal(whole["x"], rows(0)["x"])
        assert whole["note"] == "kept"
    except tdserve.CorruptDataError as error:
        assert "power" in str(error)  # noqa: PT017 (one or the other)


def check_rewritable(client: tdserve.Client, name: str, *, damaged: range, expected: list[int]) -> None:
    """Checks that unsynced content is unchanged, or damaged until it is written again, and that the rest is
    unchanged."""
    store = client[name]
    for row in range(NUM_ROWS):
        try:
            found = store[row]["x"]
        except tdserve.CorruptDataError as error:
            assert row in damaged
            assert "had not reached the disk when the power was lost" in str(error)  # noqa: PT017 (one or the other)
        else:
            assert found.tolist() == [expected[row]] * ITEMS
    before = len(damaged)
    store[damaged.start : damaged.stop] = TensorDict({"x": rows(300, before)["x"]}, [before])
    assert store[:]["x"][damaged.start : damaged.stop, 0].tolist() == list(range(300, 300 + before))
    again = torch.tensor(expected[damaged.start : damaged.stop])
    store[damaged.start : damaged.stop] = TensorDict({"x": again[:, None].expand(-1, ITEMS).clone()}, [before])


def check_weights(client: tdserve.Client) -> None:
    newest = client.latest("policy", timeout_s=0)
    assert newest is not None
    assert newest.version == 3
    assert newest.data["w"].unique().tolist() == [2]
    assert client.publish("policy", TensorDict({"w": torch.full((100_000,), 30)}, [])) > 13, "no number twice"
