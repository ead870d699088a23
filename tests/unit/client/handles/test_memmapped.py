from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import (
    InvalidRequestError,
    LockedError,
    NotSupportedError,
    SpecMismatchError,
    StoreNotFoundError,
    WrongStateError,
)
from tests.sameness import assert_same


def content() -> TensorDict:
    """Two levels and a value."""
    return TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text"}}, [3])


@pytest.fixture
def store(client: tdserve.Client, name: str) -> tdserve.StoreHandle:
    """A store of ``content()``."""
    made: tdserve.StoreHandle = client.memmap(content(), name)
    return made


def test_handle_when_asked_then_it_is_memory_mapped_at_its_saved_path(store: tdserve.StoreHandle) -> None:
    assert store.is_memmap()
    assert isinstance(store.saved_path, Path)
    found = TensorDict.load_memmap(store.saved_path, allow_pickle=False)
    assert torch.equal(found["a"], content()["a"])


def test_consolidate_when_called_then_a_local_copy_in_one_block(store: tdserve.StoreHandle, tmp_path: Path) -> None:
    found = store.consolidate()
    assert found.is_consolidated()
    store.consolidate(filename=tmp_path / "td.bin", num_threads=0)
    back: Any = TensorDict
    assert torch.equal(back.from_consolidated(tmp_path / "td.bin")["a"], content()["a"])


def test_refresh_when_others_add_and_remove_keys_then_the_spec_has_the_new_keys(
    client: tdserve.Client, store: tdserve.StoreHandle
) -> None:
    client[store.name].set("b", torch.ones(3)).del_("a")
    assert store.memmap_refresh_() is store
    assert set(store.spec.keys()) == {"b", "n"}
    client.delete(store.name)
    with pytest.raises(StoreNotFoundError):
        store.memmap_refresh_()


def test_load_in_place_when_of_another_store_then_as_that_one(
    client: tdserve.Client, store: tdserve.StoreHandle, name: str
) -> None:
    other = TensorDict({"a": torch.ones(3, 4, dtype=torch.int8), "new": {"x": torch.zeros(3), "t": "other"}}, [3])
    client.memmap(other, f"{name}-other")
    assert store.load_memmap_(f"{name}-other") is store
    assert_same(client.load_memmap(name), other)
    assert store.load_memmap_() is store.load_memmap_(name) is store
    assert_same(client.load_memmap(name), other)
    assert_same(store.load(f"{name}-other"), other)
    assert store.load_memmap(f"{name}-other", "meta")["a"].is_meta
    other["a"] += 1
    client.send(other, f"{name}-other")
    assert store.load_(f"{name}-other") is store
    assert_same(client.load_memmap(name), other)
    client.memmap(TensorDict({"a": torch.ones(2)}, [2]), f"{name}-short")
    with pytest.raises(SpecMismatchError):
        store.load_memmap_(f"{name}-short")
    assert_same(client.load_memmap(name), other)


def test_load_in_place_when_lazy_stacks_then_rows_are_written_over(client: tdserve.Client, name: str) -> None:
    rows = [
        lazy_stack([TensorDict({"x": torch.full((n,), float(n))}, []) for n in sizes]) for sizes in ((1, 2), (3, 4))
    ]
    store = client.memmap(rows[0], name)
    client.memmap(rows[1], f"{name}-other")
    store.load_memmap_(f"{name}-other")
    assert [row["x"].tolist() for row in client.load_memmap(name).unbind(0)] == [[3.0] * 3, [4.0] * 4]


def test_make_memmap_when_called_then_zeros_for_all_and_the_memory_where_it_is_shared(
    client: tdserve.Client, store: tdserve.StoreHandle
) -> None:
    made = store.make_memmap(("nested", "b"), (3, 4))
    assert (made.shape, made.dtype) == (torch.Size([3, 4]), torch.float32)
    assert torch.equal(client[store.name]["nested", "b"], torch.zeros(3, 4))
    made[1] = 5.0
    is_shared = client.stats()["transport"] == "shm"
    assert store["nested", "b"][1, 0].item() == (5.0 if is_shared else 0.0)
    assert store.make_memmap("c", [3], dtype=torch.int8).dtype == torch.int8


def test_make_memmap_from_tensor_when_called_then_a_copy_of_it(store: tdserve.StoreHandle) -> None:
    source = torch.ones(3, 2)
    made = store.make_memmap_from_tensor("b", source)
    source.zero_()
    assert made.sum() == 6.0
    assert store["b"].sum() == 6.0
    empty = store.make_memmap_from_tensor(("n", "c"), torch.ones(3, dtype=torch.int16), copy_data=False)
    assert (empty.dtype, empty.sum().item(), store["n", "c"].sum().item()) == (torch.int16, 0, 0)


def test_make_memmap_from_storage_when_called_then_what_it_begins_with(store: tdserve.StoreHandle) -> None:
    storage = torch.arange(10, dtype=torch.int32).untyped_storage()
    made = store.make_memmap_from_storage("b", storage, (3, 2), dtype=torch.int32)
    assert made.tolist() == store["b"].tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InvalidRequestError, match="40 bytes are fewer than the 48"):
        store.make_memmap_from_storage("c", storage, (3, 4), dtype=torch.int32)


def test_make_memmap_when_it_cannot_be_then_refused_and_nothing_is_changed(
    client: tdserve.Client, store: tdserve.StoreHandle
) -> None:
    shapes = torch.tensor([[1], [2], [3]])
    with pytest.raises(WrongStateError, match="set"):
        store.make_memmap("a", (3,))
    with pytest.raises(WrongStateError, match="n"):
        store.make_memmap_from_tensor(("n", "t"), torch.ones(3))
    with pytest.raises(SpecMismatchError):
        store.make_memmap("b", (2, 3))
    with pytest.raises(NotSupportedError, match="set"):
        store.make_memmap("b", shapes)
    with pytest.raises(NotSupportedError, match="nested"):
        store.make_memmap_from_storage("b", torch.ones(6).untyped_storage(), shapes)
    store.lock_()
    with pytest.raises(LockedError):
        store.make_memmap("b", (3,))
    store.unlock_()
    assert_same(client.load_memmap(store.name), content())
