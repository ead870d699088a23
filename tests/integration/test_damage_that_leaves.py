"""Damage of a server's disk stays known when the content goes elsewhere: to a checkpoint, or to another server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.errors import DamagedRowError
from tdserve.server.checking.root_check import check_root

pytestmark = pytest.mark.integration

NUM_ROWS = 12
DAMAGED = 5
ROW_NBYTES = 24
NAMES = ["dataset", "plain", "queue", "table", "td", "texts"]
VERSION = "weights/versions/2.safetensors"

Leave = Callable[[], None]


def make_rows(first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + NUM_ROWS)
    return TensorDict({"x": numbers[:, None].expand(-1, ROW_NBYTES // 4).float(), "i": numbers}, [NUM_ROWS])


def fill(client: tdserve.Client) -> None:
    """Makes a store of each kind that has rows, and weights. All stores but one compare checksums."""
    rows = make_rows()
    texts = TensorDict({"x": rows["x"], "t": NonTensorStack(*(f"text {n}" for n in range(NUM_ROWS)))}, [NUM_ROWS])
    client.init_remote(rows, "td", checksum=True)
    client.init_remote(rows, "dataset", checksum=True, durability="disk")
    client.init_remote(texts, "texts", checksum=True)
    client.init_remote(rows, "plain")
    for name in ("td", "dataset", "texts", "plain"):  # the files of a small store come with its first use
        client[name].set_at_("x", torch.zeros(ROW_NBYTES // 4), 0)
    client.create_replay("table", rows[0], NUM_ROWS, checksum=True, sampler=tdserve.Prioritized()).extend(rows)
    client.create_queue("queue", rows[0], NUM_ROWS, checksum=True).extend(rows)
    for step in (1, 2):
        client.publish("weights", TensorDict({"w": torch.full((500,), float(step))}, []), keep=2)


def flip(path: Path, at: int) -> None:
    """Flips a bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server that ended in order, and started again after one row of each store and a version were damaged."""
    root = tmp_path / "source"
    with tdserve.Server(root, port=0) as made, made.client() as client:
        fill(client)
    for name in NAMES:
        flip(root / "stores" / name / "rows/x.memmap", ROW_NBYTES * DAMAGED + 2)
    flip(root / "stores" / VERSION, 1000)
    with tdserve.Server(root, port=0) as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> Iterator[tdserve.Server]:
    """An empty server."""
    with tdserve.Server(tmp_path / "target", port=0) as made:
        yield made


@pytest.fixture(params=["checkpoint", "move"])
def leave(request: pytest.FixtureRequest, source: tdserve.Server, target: tdserve.Server, tmp_path: Path) -> Leave:
    """Brings all stores to the target."""

    def restore() -> None:
        with source.client() as client, target.client() as other:
            for _ in range(2):  # the later one has what has changed since
                assert client.checkpoint(tmp_path / "place").left_out == []
                client["td"].set_at_("x", torch.full((ROW_NBYTES // 4,), 2.0), 2)
                client.checkpoint(tmp_path / "place")
            other.restore(tmp_path / "place")

    def move() -> None:
        with tdserve.connect(f"{source.address},{target.address}") as cluster:
            assert isinstance(cluster, tdserve.ClusterClient)
            for name in (*NAMES, "weights"):
                assert cluster.rebalance(name, 1) == 1

    return {"checkpoint": restore, "move": move}[request.param]


def check_damaged(client: tdserve.Client) -> None:
    """Checks that reads of a damaged row fail in each store that compares checksums, and that all other rows are
    whole."""
    others = [number for number in range(1, NUM_ROWS) if number != DAMAGED]
    for name in ("td", "dataset", "texts"):
        with pytest.raises(DamagedRowError, match=f"row {DAMAGED} of store '{name}'"):
            client[name][DAMAGED]
        assert client[name][others]["x"][:, 3].tolist() == others
    assert list(client["texts"][others]["t"]) == [f"text {number}" for number in others]
    table = client.replay("table")
    with pytest.raises(DamagedRowError, match=f"row {DAMAGED} of store 'table'"):
        table[DAMAGED]
    assert table[others]["x"][:, 3].tolist() == others
    with client.queue("queue").take(DAMAGED) as taken:
        assert taken["i"].tolist() == list(range(DAMAGED))
    with pytest.raises(DamagedRowError, match=f"row {DAMAGED} of store 'queue'"):
        client.queue("queue").take(1)


@pytest.mark.slow
def test_rows_and_versions_when_damaged_before_they_leave_then_damaged_where_they_come(
    target: tdserve.Server, leave: Leave
) -> None:
    leave()
    with target.client() as client:
        check_damaged(client)
        client.replay("table").update_priority([1, 2], torch.tensor([3.0, 4.0]))
    target.shutdown()
    report = check_root(Path(target.config.root), repairs=True)
    damaged = {each.store: each.rows for each in report.findings if each.rows}
    assert damaged == {name: [DAMAGED] for name in NAMES}
    assert [each.path for each in report.findings if not each.rows] == [f"stores/{VERSION}"]
    assert check_root(Path(target.config.root)).num_damaged == 0
