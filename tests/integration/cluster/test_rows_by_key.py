"""Rows choose their shards by a key, whether they come in one dimension or several, one by one, and in any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ClosedError, InvalidRequestError, WriterFailedError
from tests.integration.cluster.names import next_name

pytestmark = pytest.mark.integration

ROW = TensorDict({"number": torch.tensor(0), "episode": torch.tensor(0)}, [])


def make_rows(first: int, num_rows: int, *, num_episodes: int = 12) -> TensorDict:
    """Returns rows whose episodes take turns."""
    number = torch.arange(first, first + num_rows)
    return TensorDict({"number": number, "episode": number % num_episodes}, [num_rows])


def make_table(user: tdserve.ClusterClient, name: str, **settings: Any) -> tdserve.ShardedReplayHandle:
    """Creates a table whose shards are chosen by episode."""
    table: tdserve.ShardedReplayHandle = user.create_replay(
        name, ROW, 900, shards="all", shard_by="episode", **settings
    )
    return table


def find_shards(table: tdserve.ShardedReplayHandle) -> dict[Any, set[int]]:
    """Returns the shards that have rows of each episode, as a large sample shows it."""
    drawn, found = table.sample(2048), dict[Any, set[int]]()
    shards = (drawn["index"] // table.part_capacity).tolist()
    for episode, shard in zip(drawn["episode"].tolist(), shards, strict=True):
        found.setdefault(episode, set()).add(shard)
    return found


@pytest.mark.slow
def test_writer_when_rows_go_by_key_then_each_episode_is_whole_and_in_order(
    user: tdserve.ClusterClient, name: str
) -> None:
    table = make_table(user, name, sampler=tdserve.Slices(slice_len=4))
    with table.writer(batch=8) as writer:
        for episode in range(12):
            for step in range(6):
                number = torch.tensor(10 * episode + step)
                writer.append(TensorDict({"number": number, "episode": torch.tensor(episode)}))
            writer.end_trajectory()
        writer.flush()
        assert (writer.num_appended, writer.num_acknowledged, writer.num_buffered, writer.num_under_way) == (
            72,
            72,
            0,
            0,
        )
    with pytest.raises(ClosedError):
        writer.append(make_rows(0, 1)[0])
    shards = find_shards(table)
    assert sorted(shards) == list(range(12))
    assert all(len(each) == 1 for each in shards.values())
    assert len(set.union(*shards.values())) == 3
    slices = table.sample(64)
    assert (slices["number"].reshape(16, 4).diff(dim=1) == 1).all()
    assert (slices["episode"].reshape(16, 4).diff(dim=1) == 0).all()


@pytest.mark.slow
def test_writer_when_a_row_is_wrong_then_refused_and_goes_on(user: tdserve.ClusterClient, name: str) -> None:
    table = make_table(user, name)
    with pytest.raises(InvalidRequestError, match="max_bytes"):
        table.writer(max_bytes=0)
    with table.writer() as writer:
        with pytest.raises(InvalidRequestError, match="episode"):
            writer.append(TensorDict({"number": torch.tensor(1)}))
        writer.append({"number": np.int64(5), "episode": np.int32(3)})
    assert table.sample(4)["number"].tolist() == [5] * 4
    writer = table.writer()
    writer.append(make_rows(7, 1)[0])
    with pytest.raises(RuntimeError, match="work"), writer:
        raise RuntimeError("work")
    assert set(table.sample(256)["number"].tolist()) == {5, 7}


@pytest.mark.slow
def test_writer_when_the_table_is_closed_then_fails_once_for_all_shards(user: tdserve.ClusterClient, name: str) -> None:
    table = make_table(user, name)
    writer = table.writer(flush_s=None)
    for row in make_rows(0, 24):
        writer.append(row)
    table.close()
    with pytest.raises(WriterFailedError):
        writer.flush()


@pytest.mark.slow
def test_rows_when_in_two_dimensions_then_numbers_have_them_too(user: tdserve.ClusterClient, name: str) -> None:
    table = make_table(user, name, sampler=tdserve.Slices(slice_len=3))
    number = torch.arange(40).reshape(8, 5)
    episode = torch.arange(8)[:, None].expand(8, 5)
    written = table.extend(TensorDict({"number": number, "episode": episode}, [8, 5]), flatten=True)
    assert written.shape == (8, 5)
    assert torch.equal(table[written.reshape(-1)]["number"], number.reshape(-1))
    early = table.extend(
        TensorDict({"number": number + 40, "episode": episode}, [8, 5]), flatten=True, return_early=True
    )
    assert early.result().shape == (8, 5)
    slices = table.sample(60)
    assert (slices["number"].reshape(20, 3).diff(dim=1) == 1).all()
    assert table.extend(make_rows(80, 1)[0]).shape == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_rows_when_their_key_has_another_dtype_then_the_same_shards(
    user: tdserve.ClusterClient, name: str, dtype: torch.dtype
) -> None:
    table = make_table(user, name)
    rows = make_rows(0, 60)
    before = table.extend(rows) // table.part_capacity
    after = table.extend(rows.clone().set("episode", rows["episode"].to(dtype))) // table.part_capacity
    assert torch.equal(before, after)


@pytest.mark.slow
def test_rows_when_their_key_is_text_then_the_writer_and_extend_agree(user: tdserve.ClusterClient) -> None:
    like = TensorDict({"number": torch.tensor(0), "episode": "first"}, [])
    name = next_name()
    table = user.create_replay(name, like, 300, shards="all", shard_by="episode")
    try:
        for episode in "abcdef":
            table.extend(TensorDict({"number": torch.tensor([1]), "episode": [episode]}, [1]))
        with table.writer() as writer:
            for episode in "abcdef":
                writer.append(TensorDict({"number": torch.tensor(2), "episode": episode}))
        assert sorted(table[:]["number"].tolist()) == [1] * 6 + [2] * 6
        shards = find_shards(table)
        assert sorted(shards) == list("abcdef")
        assert {len(each) for each in shards.values()} == {1}
    finally:
        user.delete(name)
