"""``torch.save`` takes what is read: leaves of several dtypes have storages of their own over one buffer."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import tdserve
from tests.sameness import difference

pytestmark = pytest.mark.integration

NUM_ROWS = 3000
"""Enough that content travels by itself."""

OVERHEAD_BYTES = 8000


def mixed(num_rows: int) -> TensorDict:
    """Returns rows of several dtypes. Neighbours have the same shape and dtype."""
    number = torch.arange(num_rows)
    nested = TensorDict({"obs": number[:, None].repeat(1, 5).float(), "half": number.bfloat16()}, [num_rows])
    leaves = {"obs": number[:, None].repeat(1, 5).float(), "number": number, "odd": number[:, None] % 2 == 1}
    return TensorDict({**leaves, "next": nested}, [num_rows])


@pytest.fixture(scope="module", params=["shm", "gloo", "grpc"])
def reader(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param) as client:
        yield client


@pytest.fixture(scope="module", params=[8, NUM_ROWS])
def names(request: pytest.FixtureRequest, reader: tdserve.Client) -> Iterator[dict[str, str]]:
    """Names of a table, a tensordict store, weights and a keyed store with these rows."""
    num_rows: int = request.param
    found = {
        kind: f"saved-{kind}-{reader.stats()['transport']}-{num_rows}" for kind in ("table", "store", "weights", "kv")
    }
    rows = mixed(num_rows)
    reader.create_replay(found["table"], like=rows[0], capacity=num_rows).extend(rows)
    reader.init_remote(rows, found["store"])
    reader.publish(found["weights"], rows)
    reader.create_kv(found["kv"]).put("key", rows)
    yield found
    for name in found.values():
        reader.delete(name)


READS: dict[str, Callable[[tdserve.Client, dict[str, str]], Any]] = {
    "sample": lambda client, names: client[names["table"]].sample(8),
    "a row of a table": lambda client, names: client[names["table"]][3],
    "rows of a table": lambda client, names: client[names["table"]][2:6],
    "a table": lambda client, names: client[names["table"]][:],
    "store": lambda client, names: client[names["store"]][:],
    "rows of a store": lambda client, names: client[names["store"]][[1, 5]],
    "a row of a store": lambda client, names: client[names["store"]][2],
    "whole": lambda client, names: client.from_remote_init(names["store"]),
    "view": lambda client, names: client[names["store"]].select("number", "odd")[:5],
    "nested": lambda client, names: client[names["store"]]["next"],
    "weights": lambda client, names: get_newest(client, names["weights"]),
    "entry": lambda client, names: client[names["kv"]].get("key"),
}


def get_newest(client: tdserve.Client, name: str) -> Any:
    found = client.latest(name)
    assert found is not None
    return found.data


def keep(rows: Any) -> Any:
    """Returns a batch as the loader has read it."""
    return rows


def save(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
def test_save_when_a_leaf_has_no_elements_then_equal(reader: tdserve.Client, name: str, dtype: torch.dtype) -> None:
    leaves = {"z": torch.zeros(0, 3), "b": torch.ones(4, dtype=dtype), "y": torch.zeros(4, 0), "i": torch.arange(3)}
    reader.publish(name, leaves)
    found = get_newest(reader, name)
    assert difference(found, torch.load(io.BytesIO(save(found)), weights_only=False)) is None
    reader.delete(name)


@pytest.mark.parametrize("read", READS)
def test_save_when_leaves_have_several_dtypes_then_equal_and_no_larger(
    reader: tdserve.Client, names: dict[str, str], read: str
) -> None:
    found = READS[read](reader, names)
    saved = save(found)
    assert len(saved) < found.bytes() + OVERHEAD_BYTES
    assert difference(found, torch.load(io.BytesIO(saved), weights_only=False)) is None


@pytest.mark.slow
def test_leaf_when_all_else_is_gone_then_its_memory_lives(reader: tdserve.Client, names: dict[str, str]) -> None:
    store = reader[names["store"]]
    leaves = [store[:]["number"] for _ in range(3)]
    gc.collect()
    others = [store[:].zero_() for _ in range(3)]  # of the same size, in whatever memory is free
    assert len(others) == len(leaves)
    for leaf in leaves:
        assert torch.equal(leaf, torch.arange(len(store)))
        shared = leaf.share_memory_()
        assert shared.is_shared()
        assert torch.equal(shared, torch.arange(len(store)))


@pytest.mark.slow
def test_batch_when_a_worker_of_a_loader_has_read_it_then_it_can_be_saved(
    reader: tdserve.Client, names: dict[str, str]
) -> None:
    loader: Any = DataLoader(reader[names["store"]], batch_size=4, num_workers=1, collate_fn=keep)
    batch = next(iter(loader))
    assert difference(batch, mixed(4)) is None
    assert difference(batch, torch.load(io.BytesIO(save(batch)), weights_only=False)) is None
