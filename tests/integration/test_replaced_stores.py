"""A handle whose store was deleted, after another store with another number of rows has got its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import tdserve
from tdserve.base.errors import SpecMismatchError, StoreNotFoundError, TDServeError

pytestmark = pytest.mark.integration

OLD_ROWS = 10


def numbered(num_rows: int) -> TensorDict:
    """Returns rows that show their number."""
    return TensorDict({"number": torch.arange(num_rows), "wide": torch.zeros(num_rows, 3)}, [num_rows])


@pytest.fixture(scope="module", params=["shm", "gloo", "grpc"])
def reader(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param) as client:
        yield client


@pytest.fixture(params=[20, 4], ids=["longer", "shorter"])
def num_rows(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def get_old_handle(client: tdserve.Client, name: str, num_rows: int) -> Any:
    """Returns the handle of a store that was read, and then replaced by a store with so many rows."""
    client.init_remote(numbered(OLD_ROWS), name)
    old = client[name]
    assert old[-1]["number"] == old["number"][-1] == OLD_ROWS - 1
    client.delete(name)
    client.init_remote(numbered(num_rows), name)
    return old


def list_numbers(found: Any) -> list[int]:
    """Returns the numbers of rows."""
    return [int(number) for number in found["number"].reshape(-1)]


def iterate(old: Any) -> list[int]:
    return [int(row["number"]) for row in old]


def load(old: Any) -> list[int]:
    return [
        number
        for batch in DataLoader(old, batch_size=3, collate_fn=lambda rows: rows)
        for number in list_numbers(batch)
    ]


def take_batches(old: Any) -> list[int]:
    with old.batches(3) as batches:
        return [number for batch in batches for number in list_numbers(batch)]


READS: dict[str, tuple[Callable[[Any], list[int]], Callable[[int], list[int]]]] = {
    "last": (lambda old: list_numbers(old[-1]), lambda num: [num - 1]),
    "last by key": (lambda old: [int(old.get_at("number", -1))], lambda num: [num - 1]),
    "end": (lambda old: list_numbers(old[-3:]), lambda num: [*range(num - 3, num)]),
    "open": (lambda old: list_numbers(old[2:]), lambda num: [*range(2, num)]),
    "down": (lambda old: list_numbers(old[::-1]), lambda num: [*range(num - 1, -1, -1)]),
    "after an ellipsis": (lambda old: list_numbers(old[..., -2]), lambda num: [num - 2]),
    "negative list": (lambda old: list_numbers(old[[0, -1]]), lambda num: [0, num - 1]),
    "whole": (lambda old: list_numbers(old.to_tensordict()), lambda num: [*range(num)]),
    "iteration": (iterate, lambda num: [*range(num)]),
    "DataLoader": (load, lambda num: [*range(num)]),
    "batches": (take_batches, lambda num: [*range(num)]),
    "length": (lambda old: [len(old)], lambda num: [num]),
    "batch size": (lambda old: [*old.batch_size], lambda num: [num]),
    "shape": (lambda old: [*old.shape], lambda num: [num]),
}


@pytest.mark.parametrize("read", READS)
def test_read_when_the_store_has_another_number_of_rows_now_then_the_index_means_its_rows(
    reader: tdserve.Client, name: str, num_rows: int, read: str
) -> None:
    perform, expect = READS[read]
    old = get_old_handle(reader, name, num_rows)
    assert perform(old) == expect(num_rows)


def test_read_when_the_longer_store_has_the_row_or_mask_then_it_fits(reader: tdserve.Client, name: str) -> None:
    assert list_numbers(get_old_handle(reader, name, 20)[15]) == [15]
    reader.delete(name)
    mask = torch.arange(20) >= 17
    assert list_numbers(get_old_handle(reader, name, 20)[mask]) == [17, 18, 19]


@pytest.mark.parametrize("index", [-1, slice(-3, None), slice(None), 2])
def test_view_when_the_store_has_another_number_of_rows_now_then_it_is_refused(
    reader: tdserve.Client, name: str, num_rows: int, index: Any
) -> None:
    reader.init_remote(numbered(OLD_ROWS), name)
    old = reader[name]
    view = old.select("number")
    reader.delete(name)
    reader.init_remote(numbered(num_rows), name)
    with pytest.raises(SpecMismatchError, match=f"batch size \\[{num_rows}\\]"):
        view[index]
    with pytest.raises(TDServeError):
        view.set_at_("number", torch.tensor(77), -1)
    assert list_numbers(old[...]) == [*range(num_rows)]
    assert list_numbers(old.select("number")[-1]) == [num_rows - 1]


def test_iteration_when_the_store_is_replaced_within_it_then_no_row_of_another_store_comes(
    reader: tdserve.Client, name: str
) -> None:
    reader.init_remote(numbered(1000), name)
    rows = iter(reader[name])
    assert next(rows)["number"] == 0
    reader.delete(name)
    reader.init_remote(numbered(2000), name)
    with pytest.raises(SpecMismatchError):
        list(rows)


@pytest.mark.slow
def test_sizes_when_there_is_no_store_then_not_found(reader: tdserve.Client, name: str) -> None:
    reader.init_remote(numbered(OLD_ROWS), name)
    old = reader[name]
    reader.delete(name)
    for ask in (len, lambda old: old.batch_size, lambda old: old.shape):
        with pytest.raises(StoreNotFoundError):
            ask(old)
    assert name in repr(old)


def test_extend_when_the_table_is_a_smaller_ring_now_then_the_newest_rows_are_kept(
    reader: tdserve.Client, name: str
) -> None:
    replay = reader.create_replay(name, numbered(1)[0], 100)
    reader.delete(name)
    reader.create_replay(name, numbered(1)[0], 4)
    assert replay.extend(numbered(6)).tolist() == [-1, -1, 0, 1, 2, 3]
    assert list_numbers(replay[:]) == [2, 3, 4, 5]
