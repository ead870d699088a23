"""Leaves that rows of a shared table get later: all shards have them, and rows of several shards have one structure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.cluster.filling import SIZES, fill_unequally, rows

pytestmark = pytest.mark.integration

NUM_ROWS = sum(SIZES)


def add_z(td: TensorDict) -> TensorDict:
    """Rows, or one, with two leaves more."""
    td["later", "z"], td["text"] = td["number"].double(), "t"
    return td


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replay", "queue"])
def test_leaves_when_a_shared_table_gets_them_then_every_handle_reads_and_writes_them(
    user: tdserve.ClusterClient, client: tdserve.ClusterClient, name: str, kind: str
) -> None:
    create: Any = user.create_replay if kind == "replay" else user.create_queue
    mine = create(name, rows(1)[0], 300, shards="all")
    theirs: Any = client[name]
    fill_unequally(theirs)
    assert len(theirs[:]) == NUM_ROWS  # this handle has used every shard
    mine.add_leaves(add_z(rows(1))[0])
    mine.add_leaves(add_z(rows(1))[0])  # they are there
    written = [mine.extend(add_z(rows(10, 100 + 10 * writer)), writer=writer) for writer in range(1, 7)]
    for handle in (theirs, mine, client[name]):
        found = handle[:]
        old = found["number"] < 100
        assert (found["later", "z"] == torch.where(old, 0.0, found["number"].double())).all()
        assert [found[row]["text"] for row in (0, len(found) - 1)] == [None, "t"]
        assert ("later", "z") in handle.spec.leaf_paths
    numbers = torch.cat(written)
    assert (theirs[numbers]["later", "z"] == torch.arange(110.0, 170.0)).all()
    theirs.set_at_(("later", "z"), -torch.arange(60.0), numbers)
    assert (mine[numbers]["later", "z"] == -torch.arange(60.0)).all()
    if kind == "queue":
        with theirs.take(NUM_ROWS + 60) as taken:
            assert int((taken["later", "z"] < 0).sum()) == 59


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        lambda handle: handle.sample(64),
        lambda handle: handle.sample(64, require=[("later", "z")]),
        lambda handle: handle.sample(12, rank=0, world_size=2),
        lambda handle: handle.sample(12, rank=0, world_size=2, balance=("later", "z")),
        lambda handle: handle.take(30, consumer="c", ack=False),
        lambda handle: handle[::3],
        lambda handle: handle[torch.arange(NUM_ROWS) % 2 == 0],
        lambda handle: handle.set_at_(("later", "z"), torch.zeros(2, dtype=torch.int64), handle.sample(2)) or handle[:],
        lambda handle: (
            handle.extend(rows(5).set(("later", "z"), torch.zeros(5, dtype=torch.int64))) is None
            or handle.sample(64, require=("number",))
        ),
        lambda handle: next(handle.batches(64)),
    ],
)
def test_handle_when_leaves_have_come_to_all_shards_then_its_next_call_has_them(
    client: tdserve.ClusterClient, remote_client: tdserve.ClusterClient, name: str, use: Callable[[Any], Any]
) -> None:
    mine = client.create_replay(name, rows(1)[0], 300, shards="all")
    theirs = remote_client.replay(name)
    fill_unequally(theirs)
    theirs.sample(64)
    mine.add_leaves(TensorDict({"later": {"z": torch.tensor(0)}}, []))
    assert not use(theirs)["later", "z"].any()


@pytest.mark.slow
def test_leaves_when_only_some_shards_have_them_then_read_once_the_call_was_repeated(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(table)
    for shard, key in ((0, "z"), (1, "w")):  # two callers whose servers were lost have left this
        part = client.members.get(table.placement.servers[shard]).replay(f"{name}#{shard}")
        part.add_leaves(TensorDict({key: torch.tensor(0)}, []))
    reads: list[Callable[[], Any]] = [
        lambda: table.sample(500),
        lambda: table[:],
        lambda: table[torch.tensor([0, 100, 200])],
    ]
    for read in reads:
        assert not {"z", "w"} & set(read().keys())
    table.add_leaves(TensorDict({"z": torch.tensor(0), "w": torch.tensor(0)}, []))
    for read in reads:
        assert {"z", "w"} <= set(read().keys())
    assert len(table.sample(500)) == 500


@pytest.mark.slow
def test_leaves_when_others_sample_and_read_then_every_result_is_of_one_structure(
    user: tdserve.ClusterClient, client: tdserve.ClusterClient, name: str
) -> None:
    mine = client.create_replay(name, rows(1)[0], 300, shards="all")
    fill_unequally(mine)
    is_over = Event()

    def read() -> int:
        theirs, most = user.replay(name), 0
        while not is_over.is_set() or most < 4:
            for found in (theirs.sample(64), theirs[:], theirs.sample(8)):
                leaves = sorted(key for key in found.keys() if key.startswith("z"))  # noqa: SIM118 (a tensordict's keys)
                assert leaves == [f"z{number}" for number in range(len(leaves))]
                assert not any(found[leaf].any() for leaf in leaves)
                most = max(most, len(leaves))
        return most

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for number in range(4):
                mine.add_leaves(TensorDict({f"z{number}": torch.tensor(0.0)}, []))
                mine.sample(64)
        finally:
            is_over.set()
        assert reading.result(60.0) == 4
