from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass
from torch.utils.data import DataLoader, Subset

import tdserve
from tdserve.client.datasets.dataset import BLOCK_ROWS
from tdserve.client.handles.store_client import StoreClient
from tests.errors import raises
from tests.sameness import difference

NUM_ROWS = 103
SHUFFLED = tdserve.WithoutReplacement(seed=3)


@tensorclass
class Frame:
    """A row of a class of its own."""

    pixels: torch.Tensor
    label: str


def _rows(num_rows: int = NUM_ROWS) -> TensorDict:
    number = torch.arange(num_rows)
    texts = NonTensorStack(*[f"row {i}" for i in range(num_rows)])
    return TensorDict({"a": number, "n": {"b": number[:, None] + torch.zeros(num_rows, 3)}, "text": texts}, [num_rows])


@pytest.fixture
def store(client: tdserve.Client, name: str) -> tdserve.StoreHandle:
    """103 rows, each with its number and a text."""
    made: tdserve.StoreHandle = client.memmap(_rows(), name)
    return made


def _numbers(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch["a"]]


def test_getitems_when_given_indices_then_one_batch_as_a_tensordict_gives_it(store: tdserve.StoreHandle) -> None:
    for indices in ([3, 1, 1, -1], [5], [], list(range(NUM_ROWS))):
        assert difference(_rows().__getitems__(indices), store.__getitems__(indices)) is None
    with pytest.raises(IndexError):
        store.__getitems__([NUM_ROWS])


def test_getitems_when_of_a_view_then_its_keys_of_these_rows(store: tdserve.StoreHandle) -> None:
    found = store.select("a").__getitems__([3, 1])
    assert difference(_rows().select("a")[[3, 1]], found) is None


@pytest.mark.parametrize("collate", [{}, {"collate_fn": lambda x: x}])
def test_loader_when_there_are_no_workers_then_batches_are_tensordicts(
    store: tdserve.StoreHandle, collate: dict[str, Any]
) -> None:
    loader: DataLoader[Any] = DataLoader(store, batch_size=10, shuffle=True, **collate)  # type: ignore[arg-type]
    found = list(loader)
    assert [type(batch) for batch in found] == [TensorDict] * 11
    assert sorted(_numbers(found)) == list(range(NUM_ROWS))
    for batch in found:
        assert difference(_rows()[batch["a"]], batch) is None


def test_loader_when_given_a_part_of_a_store_then_its_rows(store: tdserve.StoreHandle) -> None:
    part: Subset[Any] = Subset(store, [7, 9, 11])  # type: ignore[arg-type]
    assert _numbers(DataLoader(part, batch_size=2, collate_fn=lambda x: x)) == [7, 9, 11]


def test_loader_when_given_a_replay_then_row_numbers_are_its_indices(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, _rows()[0], 200)
    replay.extend(_rows())
    loader: DataLoader[Any] = DataLoader(replay, batch_size=10, shuffle=True, collate_fn=lambda x: x)  # type: ignore[arg-type]
    assert sorted(_numbers(loader)) == list(range(NUM_ROWS))
    assert [int(row["a"]) for row in replay] == list(range(NUM_ROWS))


def test_iteration_when_over_rows_then_as_of_the_tensordict(store: tdserve.StoreHandle) -> None:
    found = list(store)
    assert len(found) == NUM_ROWS
    for expected, row in zip(_rows(), found, strict=True):
        assert difference(expected, row) is None


def test_iteration_when_there_is_no_batch_dimension_then_as_of_the_tensordict(
    client: tdserve.Client, name: str
) -> None:
    store = client.memmap(_rows()[0], name)
    with pytest.raises(TypeError, match="batch dimension"):
        iter(store)
    assert len(store) == 0
    assert list(client.memmap(_rows()[:0], f"{name}-0")) == []


@pytest.mark.slow
def test_iteration_when_of_many_rows_then_few_reads(
    local_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_client.memmap(TensorDict({"a": torch.arange(20_000)}, [20_000]), name)
    reads: list[int] = []
    read = StoreClient.read

    def counted(self: StoreClient, selection: Any, **arguments: Any) -> Any:
        found = read(self, selection, **arguments)
        reads.append(len(found))
        return found

    monkeypatch.setattr(StoreClient, "read", counted)
    rows = iter(store)
    assert next(rows)["a"] == 0
    assert sum(reads) < 100  # a program that looks at the first row need not read a thousand
    assert sum(int(row["a"]) for row in rows) == 19_999 * 10_000
    assert len(reads) < 20_000 // BLOCK_ROWS + 10


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 8, 200])
@pytest.mark.parametrize("sampler", [None, tdserve.Fifo(), SHUFFLED])
def test_batches_when_readers_share_an_epoch_then_each_row_comes_once(
    store: tdserve.StoreHandle, sampler: Any, world_size: int
) -> None:
    found = []
    for rank in range(world_size):
        with store.batches(10, sampler=sampler, rank=rank, world_size=world_size) as batches:
            own = list(batches)
        assert len(batches) == len(own)
        assert all(len(batch) == 10 for batch in own[:-1])
        for batch in own:
            assert difference(_rows()[batch["a"]], batch) is None
        found += _numbers(own)
    assert sorted(found) == list(range(NUM_ROWS))
    assert (found == sorted(found)) == (sampler is not SHUFFLED)


@pytest.mark.slow
def test_batches_when_seed_or_epoch_differ_then_other_orders_and_else_the_same(store: tdserve.StoreHandle) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return _numbers(store.batches(10, sampler=tdserve.WithoutReplacement(seed=seed), epoch=epoch))

    assert order(3, 0) == order(3, 0)
    assert len({tuple(order(seed, epoch)) for seed in (3, 4) for epoch in (0, 1)}) == 4


def test_batches_when_the_last_ones_are_dropped_then_all_readers_have_as_many(store: tdserve.StoreHandle) -> None:
    for world_size, num_batches in ((1, 10), (2, 5), (8, 1), (200, 0)):
        for rank in range(min(world_size, 8)):
            own = list(store.batches(10, sampler=SHUFFLED, rank=rank, world_size=world_size, drop_last=True))
            assert [len(batch) for batch in own] == [10] * num_batches


def test_batches_when_gone_on_with_then_those_that_are_left(store: tdserve.StoreHandle) -> None:
    whole, rest = (_numbers(store.batches(10, sampler=SHUFFLED, start=start)) for start in (0, 4))
    assert rest == whole[40:]


def test_batches_when_asked_for_their_rows_then_these_are_in_them(store: tdserve.StoreHandle) -> None:
    for batch in store.batches(10, sampler=SHUFFLED, with_index=True, device="cpu"):
        assert batch["index"].dtype == torch.int64
        assert batch["index"].tolist() == batch["a"].tolist()
    assert "index" not in next(store.batches(10))


def test_batches_when_of_a_class_or_of_rows_that_differ_then_these(client: tdserve.Client, name: str) -> None:
    frames = Frame(pixels=torch.rand(6, 2), label="x", batch_size=[6])  # type: ignore[call-arg]
    for batch in client.memmap(frames, name).batches(4, sampler=SHUFFLED):
        assert type(batch) is Frame
    with pytest.raises(tdserve.InvalidRequestError, match="Frame accepts no further keys"):
        next(client[name].batches(4, with_index=True))
    ragged = LazyStackedTensorDict(*[TensorDict({"a": torch.arange(i)}, []) for i in range(1, 5)])
    batches = list(client.memmap(ragged, f"{name}-2").batches(2, pad=0))
    assert [batch["a"].tolist() for batch in batches] == [[[0, 0], [0, 1]], [[0, 1, 2, 0], [0, 1, 2, 3]]]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "some keys": lambda each: each.select("a", ("n", "b")),
    "all keys but one": lambda each: each.exclude(("n", "b")),
    "flat keys": lambda each: each.flatten_keys(),
    "some rows": lambda each: each.split(40)[1],
    "some rows of some keys": lambda each: each.select("a", "text").chunk(2)[1].split(11)[2],
    "rows in two dimensions": lambda each: each.split([100, 3])[0].view(20, 5),
    "rows turned": lambda each: each.split([100, 3])[0].view(20, 5).permute(1, 0),
    "rows more than once": lambda each: each.select("a").expand(3, NUM_ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("sampler", [None, SHUFFLED])
def test_batches_when_of_a_view_then_its_rows_divided_as_those_of_a_store(
    store: tdserve.StoreHandle, kind: str, sampler: Any
) -> None:
    local, view = VIEWS[kind](_rows()), VIEWS[kind](store)
    found = []
    for rank in range(2):
        options: dict[str, Any] = {"sampler": sampler, "epoch": 1, "rank": rank, "world_size": 2}
        plain = list(view.batches(7, **options))
        for batch, numbered in zip(plain, view.batches(7, with_index=True, **options), strict=True):
            rows = numbered.pop("index")
            rows = rows.reshape(len(batch), -1)[:, 0]
            assert difference(local[rows], batch) is None
            assert difference(batch, numbered) is None
            found += rows.tolist()
    assert sorted(found) == list(range(len(local)))


def test_batches_when_of_a_view_of_rows_that_differ_then_filled_up_as_those_of_a_store(
    client: tdserve.Client, name: str
) -> None:
    ragged = LazyStackedTensorDict(*[TensorDict({"a": torch.arange(i), "b": torch.tensor(i)}, []) for i in range(1, 5)])
    store = client.memmap(ragged, name)
    for pad in (0, 7, {"a": 9}):
        for mine, its in zip(store.select("a", "b").batches(2, pad=pad), store.batches(2, pad=pad), strict=True):
            assert difference(its, mine) is None
    with raises(tdserve.InvalidRequestError, argument="pad"):
        next(store.select("b").batches(2, pad={"a": 9}))


def test_batches_when_of_a_view_without_rows_then_refused(store: tdserve.StoreHandle) -> None:
    with pytest.raises(tdserve.WrongStateError, match="this view of store"):
        store.unbind(0)[3].batches(2)


def test_batches_when_the_store_is_locked_then_numbered_all_the_same(store: tdserve.StoreHandle) -> None:
    store.lock_()
    for each in (store, store.select("a")):
        assert next(each.batches(NUM_ROWS, with_index=True))["index"].tolist() == list(range(NUM_ROWS))


def test_batches_when_an_argument_makes_no_sense_then_refused(client: tdserve.Client, name: str) -> None:
    store = client.memmap(TensorDict({"index": torch.arange(4)}, [4]), name)
    wrong: list[dict[str, Any]] = [
        {"sampler": tdserve.Uniform()},
        {"rank": 1},
        {"epoch": -1},
        {"prefetch": 0},
        {"start": -1},
        {"with_index": True},
    ]
    for arguments in wrong:
        with pytest.raises(tdserve.InvalidRequestError, match=next(iter(arguments))):
            store.batches(2, **arguments)
    with raises(tdserve.InvalidRequestError, argument="num_rows"):
        store.batches(0)
    with pytest.raises(tdserve.WrongStateError, match="batch dimension"):
        client.memmap(TensorDict({}, []), f"{name}-2").batches(2)


def test_batches_when_the_store_is_deleted_then_store_not_found(
    store: tdserve.StoreHandle, client: tdserve.Client
) -> None:
    batches = store.batches(1, prefetch=1)
    next(batches)
    client.delete(store.name)
    with pytest.raises(tdserve.StoreNotFoundError):
        list(batches)
