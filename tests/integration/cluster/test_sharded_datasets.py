"""A dataset over three servers: each has a block of its rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import DataLoader

import tdserve
from tdserve.base.errors import ConnectError, InvalidRequestError, KeyNotFoundError, SelectionError, StoreExistsError
from tests.processes import quiet_port

pytestmark = pytest.mark.integration

NUM_ROWS = 100
CONTENT = TensorDict(
    {
        "number": torch.arange(NUM_ROWS),
        "nested": {"pixels": torch.arange(NUM_ROWS)[:, None].expand(-1, 4).to(torch.uint8)},
        "text": NonTensorStack(*(f"text {number}" for number in range(NUM_ROWS))),
    },
    [NUM_ROWS],
)


@pytest.fixture
def frames(user: tdserve.ClusterClient, name: str) -> tdserve.ShardedDataset:
    """A dataset over all servers."""
    made = user.memmap(CONTENT, name, shards="all")
    assert isinstance(made, tdserve.ShardedDataset)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(30, 40),
        slice(90, 10, -7),
        slice(0, 0),
        ...,
        5,
        -1,
        [99, 0, 50, 50],
        np.array([34, 33]),
        torch.arange(NUM_ROWS) % 3 == 0,
    ],
)
def test_rows_when_selected_then_as_of_the_tensordict(frames: tdserve.ShardedDataset, index: Any) -> None:
    local = index.tolist() if isinstance(index, np.ndarray) else index
    local = list(range(NUM_ROWS))[local] if isinstance(local, slice) else local
    expected, found = CONTENT[local], frames[index]
    assert found["number"].tolist() == expected["number"].tolist()
    assert found["nested", "pixels"].tolist() == expected["nested", "pixels"].tolist()
    assert found.batch_size == expected.batch_size
    if found.batch_size.numel() and found.batch_size:
        assert list(found["text"]) == list(expected["text"])


@pytest.mark.slow
def test_calls_when_a_store_of_one_server_is_needed_then_refused_with_the_servers_of_the_parts(
    client: tdserve.ClusterClient, name: str
) -> None:
    client.memmap(TensorDict({"x": torch.arange(9)}, [9]), name, shards="all")
    for call in (client.from_remote_init, client.load_memmap, client.latest):
        with pytest.raises(tdserve.WrongStateError, match=rf"{name!r} has parts on servers \d, \d, \d"):
            call(name)
    assert client[name].to_tensordict()["x"].tolist() == list(range(9))


@pytest.mark.slow
def test_leaves_when_read_then_whole(frames: tdserve.ShardedDataset) -> None:
    assert frames["number"].tolist() == list(range(NUM_ROWS))
    assert frames["nested", "pixels"].shape == (NUM_ROWS, 4)
    assert frames.get_at("number", [70, 3]).tolist() == [70, 3]
    assert (len(frames), frames.batch_size, frames.batch_size[0]) == (NUM_ROWS, (NUM_ROWS,), NUM_ROWS)
    assert set(frames.keys()) == set(CONTENT.keys())
    assert set(frames.keys(True, True)) == set(CONTENT.keys(True, True))
    assert "number" in frames
    assert ("nested", "pixels") in frames
    assert "other" not in frames
    assert frames.to_tensordict()["number"].tolist() == list(range(NUM_ROWS))
    assert [int(row["number"]) for row in frames] == list(range(NUM_ROWS))
    assert sorted(frames.info()["servers"]) == [0, 1, 2]
    assert frames.info()["num_rows"] == NUM_ROWS


@pytest.mark.parametrize(
    "index",
    [
        (slice(30, 40),),
        (5,),
        ([99, 0, 50],),
        (torch.tensor([5, 70]),),
        (torch.arange(NUM_ROWS) % 3 == 0,),
        (...,),
        (..., slice(30, 40)),
        ([99, 0], ...),
        (),
        None,
        True,
        False,
        torch.tensor(True),
        (None,),
        (None, 5),
        (..., None),
        (slice(30, 40), None),
        (None, [99, 0], ..., None),
    ],
    ids=str,
)
def test_rows_when_selected_by_what_torch_takes_for_one_dimension_then_read_and_written(
    frames: tdserve.ShardedDataset, index: Any
) -> None:
    expected = CONTENT[index]
    assert frames[index].batch_size == expected.batch_size
    assert frames[index]["number"].tolist() == expected["number"].tolist()
    assert frames.get_at("number", index).tolist() == expected["number"].tolist()
    frames.set_at_("number", 1000, index)
    numbers = CONTENT["number"].clone()
    numbers[index] = 1000
    assert frames["number"].tolist() == numbers.tolist()
    frames[index] = expected
    assert frames["number"].tolist() == CONTENT["number"].tolist()


def test_rows_when_an_index_has_two_dimensions_then_a_value_of_their_shape_or_of_a_row_is_written(
    frames: tdserve.ShardedDataset,
) -> None:
    index, expected = torch.tensor([[0, 40, 80, 99]]), CONTENT["nested", "pixels"].clone()
    for value in (torch.arange(16).view(1, 4, 4).byte(), torch.arange(4).byte()):
        frames.set_at_(("nested", "pixels"), value, index)
        expected[index] = value
        assert frames["nested", "pixels"].tolist() == expected.tolist()


@pytest.mark.slow
def test_rows_when_written_then_in_their_parts(frames: tdserve.ShardedDataset) -> None:
    frames[30:40] = CONTENT[:10]
    frames[[99, 1]] = CONTENT[[5, 6]]
    frames[2] = CONTENT[50]
    frames.set_at_("number", torch.tensor([1000, 1001]), [0, 98])
    frames.set_at_("number", 7, slice(60, 70))
    found = frames["number"].tolist()
    expected = list(range(NUM_ROWS))
    expected[30:40], expected[99], expected[1], expected[2] = list(range(10)), 5, 6, 50
    expected[0], expected[98], expected[60:70] = 1000, 1001, [7] * 10
    assert found == expected
    assert list(frames[30:32]["text"]) == ["text 0", "text 1"]


@pytest.mark.slow
def test_values_when_one_is_meant_for_each_row_then_as_at_one_server(
    frames: tdserve.ShardedDataset, servers: list[tdserve.Server], name: str
) -> None:
    with servers[0].client() as single:
        alone = single.memmap(CONTENT, f"{name}-alone")
        pixels = torch.arange(4, dtype=torch.uint8)
        for handle in (frames, alone):
            handle.set_at_(("nested", "pixels"), pixels, [9, 10, 40, 80])
            handle.set_at_(("nested", "pixels"), pixels[:, None].expand(-1, 4).contiguous(), [11, 12, 41, 81])
            handle.set_at_("number", 5, slice(2, 4))
        assert torch.equal(frames["nested", "pixels"], alone["nested", "pixels"])
        assert torch.equal(frames["number"], alone["number"])
        empty: list[Any] = [[], slice(5, 5)]
        for index in empty:
            assert frames.get_at("number", index).shape == (0,)
            assert frames[index].batch_size == (0,)
        assert frames[torch.tensor([[1, 99], [50, 2]])].batch_size == (2, 2)
        single.delete(f"{name}-alone")


@pytest.mark.slow
def test_rows_when_hardly_more_than_servers_then_divided(user: tdserve.ClusterClient, name: str) -> None:
    made = user.memmap(CONTENT[:5], name, shards="all")
    assert made["number"].tolist() == list(range(5))
    assert made[3:]["number"].tolist() == [3, 4]


@pytest.mark.slow
def test_epoch_when_divided_then_every_row_once(frames: tdserve.ShardedDataset) -> None:
    seen = []
    for rank in range(3):
        sampler = tdserve.WithoutReplacement(seed=1)
        with frames.batches(8, sampler=sampler, epoch=2, rank=rank, world_size=3, with_index=True) as batches:
            for batch in batches:
                assert batch["index"].tolist() == batch["number"].tolist()
                seen += batch["number"].tolist()
    assert sorted(seen) == list(range(NUM_ROWS))
    assert len(list(frames.batches(8, drop_last=True, world_size=3, rank=2))) == 4


@pytest.mark.slow
def test_loader_when_it_has_workers_then_every_row_once(frames: tdserve.ShardedDataset) -> None:
    for num_workers in (0, 2):
        loader: DataLoader[Any] = DataLoader(
            frames,  # type: ignore[arg-type]
            batch_size=16,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=_keep,
            multiprocessing_context="spawn" if num_workers else None,
        )
        assert sorted(int(each) for batch in loader for each in batch["number"]) == list(range(NUM_ROWS))
    assert pickle.loads(pickle.dumps(frames))[17]["number"] == 17


def _keep(batch: Any) -> Any:
    return batch


@pytest.mark.slow
def test_zeros_when_made_then_filled_by_rows(user: tdserve.ClusterClient, name: str) -> None:
    made = user.memmap_like(CONTENT[0].exclude("text"), name, batch_size=[50], shards=2)
    assert made["number"].tolist() == [0] * 50
    made[20:30] = CONTENT[20:30].exclude("text")
    assert user[name][25]["number"] == 25
    with pytest.raises(StoreExistsError):
        user.memmap_like(CONTENT[0].exclude("text"), name, batch_size=[50], shards=2)
    again = user.memmap_like(CONTENT[0].exclude("text"), name, batch_size=50, shards=2, exists_ok=True)
    assert again[25]["number"] == 25
    assert user.describe(name).num_rows == 50
    user.rebalance(f"{name}#0", next(server for server in range(3) if server not in made.placement.servers))
    assert made[20:30]["number"].tolist() == list(range(20, 30))
    user.delete(name)
    assert not [each for each in user.stores() if each.startswith(name)]


@pytest.mark.slow
def test_call_when_wrong_then_refused(frames: tdserve.ShardedDataset, user: tdserve.ClusterClient) -> None:
    for index in (100, -101, [3, 100], torch.ones(3, dtype=torch.bool), 1.5, [1.5], [2.0]):
        with pytest.raises(SelectionError):
            frames[index]
    for wrong in ((0, 1), (slice(3), ..., 1), (..., 0, ...), (None, True), (True, 0)):
        with pytest.raises(InvalidRequestError):
            frames[wrong]
    for key in ("other", ("nested", "other")):
        with pytest.raises(KeyNotFoundError):
            frames[key]
    with pytest.raises(InvalidRequestError):
        frames["number"] = 1
    with pytest.raises(InvalidRequestError):
        user.memmap(CONTENT[:2], "few", shards=3)
    assert "few" not in user


def test_dataset_when_a_server_is_down_then_not_made(servers: list[tdserve.Server], name: str) -> None:
    with (
        tdserve.Server(servers[0].address)
        if False
        else tdserve.connect(
            f"{servers[0].address},{servers[1].address},127.0.0.1:{quiet_port()}", timeout_s=2.0
        ) as client
    ):
        with pytest.raises(ConnectError):
            client.memmap(CONTENT, name, shards="all")
        assert name not in client.stores()
