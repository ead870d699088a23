"""An expression on a handle gives the same as on a local tensordict: each test runs both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

import tdserve
from tests.errors import raises
from tests.sameness import difference
from tests.tensordict_strategies import Inner

pytestmark = pytest.mark.integration

BATCH = [4, 3]
MASK = torch.tensor([True, False, True, True])
GRID = torch.tensor([[True, False, True], [False, False, True], [True, True, True], [False, False, False]])

INDICES: dict[str, Any] = {
    "int": 2,
    "negative int": -1,
    "numpy int": np.int64(1),
    "slice": slice(1, 3),
    "open slice": slice(None, 2),
    "step": slice(0, 4, 2),
    "beyond": slice(2, 100),
    "none left": slice(3, 1),
    "list": [2, 0, 2],
    "nested list": [[0, 1], [2, 3]],
    "empty list": [],
    "range": range(1, 4, 2),
    "int tensor": torch.tensor([3, -1, 0]),
    "int matrix": torch.tensor([[3, 1], [0, 0]]),
    "scalar tensor": torch.tensor(1),
    "numpy array": np.array([1, 3]),
    "mask": MASK,
    "mask list": MASK.tolist(),
    "numpy mask": MASK.numpy(),
    "mask of two dimensions": GRID,
    "mask of nothing": torch.zeros(4, dtype=torch.bool),
    "None": None,
    "ellipsis": ...,
    "empty tuple": (),
    "two ints": (1, 2),
    "int, slice": (1, slice(0, 2)),
    "slice, int": (slice(1, 3), -1),
    "slices": (slice(None, None, 2), slice(1, None)),
    "all, list": (slice(None), [2, 0]),
    "list, list": ([0, 1, 3], [2, 2, 0]),
    "column and row": (torch.tensor([[0], [3]]), torch.tensor([[1, 2]])),
    "mask, int": (MASK, 1),
    "mask, slice": (MASK, slice(0, 2)),
    "ellipsis, int": (..., 1),
    "int, ellipsis": (1, ...),
    "None first": (None, 1),
    "None between": (slice(None), None, [0, 2]),
    "None last": (..., None),
    "ellipsis, mask": (..., torch.tensor([True, False, True])),
}

some_index = pytest.mark.parametrize("index", list(INDICES.values()), ids=list(INDICES))

# Where an entry has dimensions of its own, an ellipsis stands for those too.
ROW_INDICES = {name: index for name, index in INDICES.items() if not name.startswith(("ellipsis, ", "None last"))}

row_index = pytest.mark.parametrize("index", list(ROW_INDICES.values()), ids=list(ROW_INDICES))


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + int(np.prod(shape))).reshape(shape)


def local_td(start: int = 0) -> TensorDict:
    """Two batch dimensions; every element has a number of its own."""
    deep = TensorDict({"x": numbers(*BATCH, 2, 2, start=start)}, [*BATCH, 2], names=["time", "agent", "part"])
    record = Inner(z=numbers(*BATCH, start=start).float(), tag="t", batch_size=BATCH, names=["time", "agent"])
    leaves = {"obs": numbers(*BATCH, 5, start=start).double(), "done": numbers(*BATCH, start=start) % 2 == 0}
    return TensorDict({**leaves, "next": {"deep": deep}, "rec": record, "text": "one"}, BATCH, names=["time", "agent"])


@pytest.fixture
def td() -> TensorDict:
    """The local tensordict of the test."""
    return local_td()


@pytest.fixture
def store(client: tdserve.Client, name: str, td: TensorDict) -> Any:
    """A store with the same content."""
    return client.memmap(td, name)


# ---------------------------------------------------------------- reading


@some_index
def test_getitem_when_any_index_then_equals_the_local_one(store: Any, td: TensorDict, index: Any) -> None:
    assert difference(td[index], store[index]) is None


@row_index
def test_get_at_when_any_index_then_equals_the_local_one(store: Any, td: TensorDict, index: Any) -> None:
    for key in ["obs", ("next", "deep", "x")]:
        assert torch.equal(td[index][key], store.get_at(key, index))


NEGATIVE = [
    slice(None, None, -1),
    slice(3, 0, -2),
    (slice(None, None, -1), slice(2, 0, -1)),
    (slice(None, None, -1), [1]),
]


@pytest.mark.parametrize("index", NEGATIVE, ids=str)
def test_index_when_step_is_negative_then_means_what_it_means_in_numpy(store: Any, td: Any, index: Any) -> None:
    """tensordict 0.15 refuses it, NumPy says what it is."""
    found = store[index]
    for key in ["obs", "done", ("next", "deep", "x")]:
        np.testing.assert_array_equal(found[key].numpy(), td[key].numpy()[index])
    with pytest.raises(ValueError, match="step"):
        td[index]
    store[index] = found.apply(torch.zeros_like)
    changed = {key: td[key].numpy().copy() for key in ["obs", ("next", "deep", "x")]}
    for key, leaf in changed.items():
        leaf[index] = 0
        np.testing.assert_array_equal(store[key].numpy(), leaf)


def test_getitem_when_key_then_equals_the_local_entry(store: Any, td: TensorDict) -> None:
    assert torch.equal(store["obs"], td["obs"])
    assert torch.equal(store["next", "deep", "x"], td["next", "deep", "x"])
    assert difference(store["next"], td["next"]) is None
    assert difference(store["next", "deep"], td["next", "deep"]) is None
    assert type(store["rec"]) is Inner
    assert difference(store["rec"], td["rec"]) is None
    assert store["text"] == td["text"] == "one"
    assert store["rec", "tag"] == "t"


def test_attributes_when_asked_then_are_the_local_ones(store: Any, td: TensorDict) -> None:
    asked: list[Callable[[Any], Any]] = [
        lambda each: each.batch_size,
        lambda each: each.shape,
        lambda each: each.ndim,
        lambda each: each.names,
        lambda each: each.device,
        len,
        lambda each: list(each.keys()),
        lambda each: list(each.keys(True)),
        lambda each: list(each.keys(include_nested=True, leaves_only=True)),
        lambda each: list(each.keys(True, sort=True)),
        lambda each: "obs" in each.keys(),  # noqa: SIM118
        lambda each: ("next", "deep", "x") in each.keys(True),
    ]
    for ask in asked:
        assert ask(store) == ask(td)


def test_device_when_the_tensordict_had_one_then_is_the_cpu(client: tdserve.Client, name: str) -> None:
    assert client.memmap(TensorDict({"x": torch.ones(2)}, [2], device="cpu"), name).device == torch.device("cpu")


def test_get_when_key_is_missing_then_the_default_or_none_and_by_brackets_key_error(store: Any) -> None:
    assert store.get("missing", 5) == 5
    assert store.get(("next", "missing"), default="d") == "d"
    assert store.get("missing") is store.get_at("missing", 0) is None
    with raises(tdserve.KeyNotFoundError, key="missing") as raised:
        store["missing"]
    assert raised.value.key == "missing"
    assert isinstance(raised.value, KeyError)
    with pytest.raises(KeyError):
        store["next", "missing"]


def test_get_when_the_default_is_none_then_returns_none_as_tensordict_does(store: Any, td: TensorDict) -> None:
    assert store.get("missing", None) is td.get("missing", None) is None


def test_read_when_changed_locally_then_the_server_keeps_its_own(store: Any, td: TensorDict) -> None:
    store["obs"][1] = -1
    store[1].zero_()
    assert difference(store.to_tensordict(), td) is None


def test_to_tensordict_when_read_then_is_all_of_it(store: Any, td: TensorDict) -> None:
    assert difference(store.to_tensordict(), td) is None
    assert store.to_tensordict(device="cpu").device == torch.device("cpu")


# ---------------------------------------------------------------- writing


@some_index
def test_setitem_when_tensordict_then_equals_the_local_one(store: Any, td: TensorDict, index: Any) -> None:
    value = local_td(start=1000)[index].clone()
    store[index] = value
    td[index] = value
    assert difference(store.to_tensordict(), td) is None


@row_index
def test_set_at_when_tensor_then_equals_the_local_one(store: Any, td: TensorDict, index: Any) -> None:
    value = local_td(start=1000)[index]["obs"]
    store.set_at_("obs", value, index)
    td[index] = local_td(start=1000).select("obs")[index]
    assert difference(store.to_tensordict(), td) is None


VALUES: dict[str, Any] = {
    "smaller batch": lambda td: td[0],
    "own copy": lambda td: td[1:3],
    "dict": lambda td: td[1:3].to_dict(),
}


@pytest.mark.parametrize("make", list(VALUES.values()), ids=list(VALUES))
def test_setitem_when_value_is_expanded_then_equals_the_local_one(store: Any, td: TensorDict, make: Any) -> None:
    store[1:3] = make(local_td(start=500))
    td[1:3] = make(local_td(start=500))
    assert difference(store.to_tensordict(), td) is None


@pytest.mark.parametrize("value", [0, 2.5, -1, True, torch.tensor(3), torch.zeros(())])
def test_setitem_when_number_then_every_tensor_gets_it(client: tdserve.Client, name: str, value: Any) -> None:
    """Non-tensor entries keep their values, as tensordict announces for 0.17; 0.15 puts tensors there."""
    ours = TensorDict({"x": numbers(4, 3), "n": {"y": numbers(4, 2)}, "text": "one"}, [4])
    store = client.memmap(ours, name)
    if isinstance(value, torch.Tensor) and value.dtype != torch.int64:
        with pytest.raises(tdserve.SpecMismatchError, match="float32"):
            store[1:3] = value
        return
    store[1:3] = value
    changed = ours.exclude("text")
    changed[1:3] = value
    assert difference(store.to_tensordict(), changed.set_non_tensor("text", "one")) is None


def test_setitem_when_key_then_replaces_that_entry(store: Any, td: TensorDict) -> None:
    new = local_td(start=77)
    store["obs"] = new["obs"]
    store["next", "deep", "x"] = new["next", "deep", "x"]
    store["rec"] = new["rec"]
    td.update(new.select("obs", ("next", "deep", "x"), "rec"))
    assert difference(store.to_tensordict(), td) is None
    store["next"] = local_td()["next"]
    assert difference(store["next"], local_td()["next"]) is None


def test_set_when_value_broadcasts_then_equals_the_local_one(store: Any, td: TensorDict) -> None:
    store.set_at_("obs", torch.arange(5).double(), (1, slice(None)))
    td["obs"][1, :] = torch.arange(5).double()
    store.set_at_("obs", 9.0, ([0, 2], 1))
    td["obs"][[0, 2], 1] = 9.0
    store.set("done", torch.ones(BATCH, dtype=torch.bool)).set("obs", td["obs"])
    td["done"] = torch.ones(BATCH, dtype=torch.bool)
    assert difference(store.to_tensordict(), td) is None


def test_update_when_some_leaves_are_given_then_only_those_change(store: Any, td: TensorDict) -> None:
    new = local_td(start=300)
    store.update_(new.select("obs", ("next", "deep", "x")))
    td.update_(new.select("obs", ("next", "deep", "x")))
    assert difference(store.to_tensordict(), td) is None
    store.update_at_(new.select("done")[1:3], slice(1, 3))
    td.update_at_(new.select("done")[1:3], slice(1, 3))
    store.update_at_({"obs": torch.zeros(3, 5).double()}, 2)
    td.update_at_({"obs": torch.zeros(3, 5).double()}, 2)
    ones: Any = {"next": {"deep": {"x": torch.ones(4, 3, 2, 2, dtype=torch.int64)}}}
    store.update_(ones)
    td.update_(ones)
    assert difference(store.to_tensordict(), td) is None


def test_rows_when_large_then_are_written_and_read_over_the_channel(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"x": torch.randn(5000, 7), "n": {"y": torch.arange(5000)}}, [5000])
    store = client.memmap(td, name)
    indices: list[Any] = [slice(0, 5000, 2), torch.randperm(5000)[:3000], torch.rand(5000) < 0.8]
    for index in indices:
        store[index] = td[index] * 2
        td[index] = td[index] * 2
        assert difference(store[index], td[index]) is None
    assert difference(store.to_tensordict(), td) is None


def test_store_when_it_has_one_row_then_is_read_and_written_whole(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"x": torch.arange(3), "s": torch.tensor(1.0)}, [])
    store = client.memmap(td, name)
    store[...] = td * 2
    assert difference(store[...], td * 2) is None
    assert difference(store[None], (td * 2)[None]) is None
    assert len(store) == len(td)
    with pytest.raises(IndexError):
        store[0]


# ---------------------------------------------------------------- non-tensor values


@pytest.fixture
def prompts() -> TensorDict:
    """Rows with a text each, and one value for all."""
    texts = NonTensorStack("a", "b", "c", "d", "e")
    td = TensorDict({"prompt": texts, "n": torch.arange(5), "who": "all"}, [5])
    td.set_non_tensor(("in", "meta"), {"k": 1})
    return td


def test_values_when_read_by_rows_then_equal_the_local_ones(
    client: tdserve.Client, name: str, prompts: TensorDict
) -> None:
    store = client.memmap(prompts, name)
    assert store["who"] == prompts["who"]
    assert difference(store.get("prompt"), prompts.get("prompt")) is None
    indices: list[Any] = [2, slice(2, 5), [4, 0], torch.tensor([True, False, False, True, True]), None]
    for index in indices:
        assert difference(store[index], prompts[index]) is None


def test_values_when_a_row_is_replaced_then_it_has_the_other_value(
    client: tdserve.Client, name: str, prompts: TensorDict
) -> None:
    store = client.memmap(prompts, name)
    row = TensorDict({"prompt": "new", "n": torch.tensor(30), "who": "me"}, [])
    store[3] = row
    prompts[3] = row
    assert difference(store.to_tensordict(), prompts) is None
    assert store[2:5]["prompt"] == ["c", "new", "e"]
    assert store[3]["who"] == "me"
    assert store[2:5].get("who").tolist() == ["all", "me", "all"]
    assert store[2:5]["n"].tolist() == [2, 30, 4]
    store.set_at_("prompt", "set", 0)
    assert store["prompt"] == ["set", "b", "c", "new", "e"]


def test_values_when_set_for_all_rows_then_single_ones_are_forgotten(
    client: tdserve.Client, name: str, prompts: TensorDict
) -> None:
    store = client.memmap(prompts, name)
    store.set_at_("who", "me", 1)
    store["who"] = "everybody"
    store["prompt"] = NonTensorStack(*"vwxyz")
    assert store["who"] == "everybody"
    assert store["prompt"] == list("vwxyz")


@pytest.mark.parametrize("index", [(2, 1), (slice(1, 3), 0), (0, slice(None), 1)], ids=str)
def test_get_at_when_the_index_goes_beyond_the_batch_then_into_the_rows(
    client: tdserve.Client, name: str, index: Any
) -> None:
    td = TensorDict(
        {"x": torch.arange(24).view(4, 3, 2), "n": TensorDict({"y": torch.arange(12).view(4, 3)}, [4, 3])}, [4]
    )
    store = client.memmap(td, name)
    assert torch.equal(store.get_at("x", index), td.get_at("x", index))
    if len(index) == 2:
        assert torch.equal(store.get_at("n", index)["y"], td.get_at("n", index)["y"])


def test_get_at_when_there_is_no_batch_dimension_then_into_the_tensor(client: tdserve.Client, name: str) -> None:
    store = client.memmap(TensorDict({"x": torch.arange(6).view(2, 3)}, []), name)
    assert store.get_at("x", 1).tolist() == [3, 4, 5]
    assert store.get_at("x", (slice(None), 2)).tolist() == [2, 5]
    assert store.get_at("x", ...).shape == (2, 3)


@pytest.mark.parametrize("index", [0, (slice(None), 1), (..., 0), slice(1, 2), (1, 2)], ids=str)
def test_getitem_when_rows_of_another_dimension_have_other_keys_then_as_of_the_lazy_stack(
    client: tdserve.Client, name: str, index: Any
) -> None:
    parts = [TensorDict({"x": torch.full((2, size), size), f"only{size}": torch.ones(2)}, [2]) for size in (1, 2, 3)]
    td = LazyStackedTensorDict(*parts, stack_dim=1, stack_dim_name="agent")
    store = client.memmap(td, name)
    assert difference(store[index], td[index]) is None
    assert [difference(row, part) for row, part in zip(store, td, strict=True)] == [None, None]


def test_to_tensordict_when_retain_none_is_given_then_as_of_tensordict(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"x": torch.ones(2), "note": "text"}, [2])
    store = client.memmap(td, name)
    for retain_none in (True, False, None):
        expected = td.to_tensordict(retain_none=retain_none)
        assert difference(store.to_tensordict(retain_none=retain_none), expected) is None
        assert difference(store.select("x").to_tensordict(retain_none=retain_none), expected.select("x")) is None


def test_len_when_rows_of_rows_differ_then_asks_the_content(client: tdserve.Client, name: str) -> None:
    pairs = [[TensorDict({"x": torch.zeros(size), f"only{size}": torch.ones(())}, []) for size in (1, 2)]] * 3
    td = LazyStackedTensorDict(*[LazyStackedTensorDict(*pair, stack_dim=0) for pair in pairs], stack_dim=1)
    store = client.memmap(td, name)
    assert len(store) == len(td) == 2
    assert [difference(row, part) for row, part in zip(list(store), td, strict=True)] == [None, None]
