"""Every public method of the installed tensordict: a store does the same, or its error says what to call instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase

import tdserve
from tdserve.client.handles.tensordict_names import CONSTANTS, REFUSED, Kind, find_kind
from tests.sameness import difference
from tests.tensordict_examples import Call, doubled, example, fault, local_td, mask, names, outcome

ELSEWHERE = {
    **dict.fromkeys(["all_gather", "asend", "gather_and_stack", "init_remote", "isend", "send"], "needs other ranks"),
    **dict.fromkeys(["cuda", "pin_memory", "record_stream"], "needs a GPU"),
    "as_tensor": "memory-mapped content comes as plain tensors",
    "is_memmap": "a store is",
    **dict.fromkeys(["load", "load_", "load_memmap", "load_memmap_"], "they take a store's name"),
    **dict.fromkeys(["map", "map_iter"], "needs processes"),
    "memmap_refresh_": "every read is of what the store holds now",
    "new_empty": "what it returns is not initialised",
    "saved_path": "a store has one",
}
"""Names that a comparison with a local tensordict says nothing about."""


@pytest.fixture(scope="module")
def local_client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """One client for all methods."""
    with server.client(transport="shm", timeout_s=20.0) as made:
        yield made


@pytest.fixture
def store(local_client: tdserve.Client, name: str) -> Any:
    """A store with the content of ``local_td``."""
    return local_client.memmap(local_td(), name)


@pytest.mark.parametrize("method", [name for name in names() if name not in ELSEWHERE])
def test_method_when_called_then_as_of_the_local_one_or_refused_with_advice(
    store: Any, method: str, tmp_path: Path
) -> None:
    if isinstance(inspect.getattr_static(TensorDictBase, method), (classmethod, staticmethod)):
        assert getattr(store, method) == getattr(TensorDict, method)
        return
    td = local_td()
    call = example(method, tmp_path)
    remote = outcome(call, store)
    if isinstance(remote, tdserve.NotSupportedError):
        assert remote.reason == REFUSED[method]
    else:
        assert fault(outcome(call, td), remote) is None
        assert difference(td, store.to_tensordict()) is None  # only calls in place reached the store


@pytest.mark.parametrize("method", ELSEWHERE)
def test_method_when_it_is_not_compared_then_it_is_there(store: Any, method: str) -> None:
    assert getattr(store, method) is not None


def test_refused_when_listed_then_tensordict_has_the_name_and_the_advice_is_a_sentence() -> None:
    assert [name for name in REFUSED if find_kind(name) is not Kind.REFUSED] == []
    assert [name for name, reason in REFUSED.items() if len(reason) < 20] == []
    assert [name for name in CONSTANTS if find_kind(name) is not Kind.STRUCTURE] == []


def test_name_when_no_tensordict_has_it_then_attribute_error(store: Any) -> None:
    for typo in ["selekt", "to_tensordicts", "_ipython_display_", "__array__"]:
        assert not hasattr(store, typo)
    with pytest.raises(AttributeError, match="to_tensordict"):
        tensordict.merge_tensordicts(store, local_td())


OPERATIONS: dict[str, Call] = {
    "+": lambda each: each + 1,
    "1 +": lambda each: 1 + each,
    "+ tensordict": lambda each: each + doubled(),
    "-": lambda each: each - 1,
    "1 -": lambda each: 1 - each,
    "*": lambda each: 2 * each * 2,
    "/": lambda each: each / 2,
    "2 /": lambda each: 2 / each,
    "%": lambda each: each % 2,
    "**": lambda each: each**2,
    "2 **": lambda each: 2**each,
    "-each": lambda each: -each,
    "abs": abs,
    "==": lambda each: each == local_td(),
    "== number": lambda each: each == 0.05,
    "!=": lambda each: each != doubled(),
    "<": lambda each: each < 0.5,
    "<=": lambda each: each <= 0.55,
    ">": lambda each: each > 0.5,
    ">=": lambda each: each >= doubled(),
    "and or xor not": lambda each: ~((each > 0.5) & (each > 0) | (each > 1) ^ (each > 2)),
    "all": lambda each: (each == local_td()).all(),
    "any": lambda each: each.any(dim=0),
    "sum": lambda each: each.sum(dim=1),
    "mean": lambda each: each.mean(reduce=True),
    "items": lambda each: list(each.items(include_nested=True, leaves_only=True)),
    "values": lambda each: list(each.values(True, True, sort=True)),
    "keys minus": lambda each: each.keys() - {"a"},
    "keys with is_leaf": lambda each: list(each.keys(True, True, is_leaf=lambda kind: True)),
    "get_at with default": lambda each: each.get_at("missing", 0, None),
    "get_non_tensor default": lambda each: each.get_non_tensor("missing", default=3),
    "named_apply": lambda each: each.named_apply(lambda key, x: x + len(key), nested_keys=True),
    "apply with others": lambda each: each.apply(lambda x, y: x + y, doubled()),
    "apply batch_size": lambda each: each.apply(lambda x: x.sum(), batch_size=[]),
    "gather along the second": lambda each: each.gather(1, torch.tensor([[0, 2], [1, 1], [2, 0], [0, 0]])),
    "gather backwards": lambda each: each.gather(-1, torch.tensor([[0], [1], [2], [0]])),
    "gather out of range": lambda each: each.gather(0, torch.tensor([[9, 9, 9]])),
    "gather negative": lambda each: each.gather(0, torch.tensor([[-1, -1, -1]])),
    "masked_select rows": lambda each: each.masked_select(torch.tensor([True, False, True, False])),
    "masked_select nothing": lambda each: each.masked_select(torch.zeros(4, 3, dtype=torch.bool)),
    "to device": lambda each: each.to("cpu"),
    "to dtype and device": lambda each: each.to("cpu", torch.float16),
    "empty": lambda each: each.empty(recurse=True),
    "update_ with keys": lambda each: each.update_(doubled(), keys_to_update=["a"]).to_tensordict(),
    "update_at_ with keys": lambda each: each.update_at_(doubled()[1], 1, keys_to_update=[("n", "b")]).to_tensordict(),
    "torch.stack": lambda each: torch.stack([each, doubled()]),
    "torch.stack after": lambda each: torch.stack([doubled(), each], 1),
    "torch.cat": lambda each: torch.cat([each, each], 1),
    "tensordict.stack": lambda each: tensordict.stack([each, each]),
    "torch.zeros_like": torch.zeros_like,
    "TensorDict of it": TensorDict,
    "update of a local one": lambda each: doubled().update(each),
    "update_ of a local one": lambda each: doubled().update_(each),
    "typo": lambda each: each.slect("a"),
}


@pytest.mark.parametrize("call", list(OPERATIONS.values()), ids=list(OPERATIONS))
def test_operation_when_performed_then_as_of_the_local_one(store: Any, call: Call) -> None:
    td = local_td()
    assert fault(outcome(call, td), outcome(call, store)) is None
    assert difference(td, store.to_tensordict()) is None


def test_operator_when_in_place_then_the_store_has_it(store: Any) -> None:
    td = local_td()
    same, same_td = store, td
    same += 1
    same *= doubled()
    same -= 0.5
    same /= 2
    same **= 2
    same_td += 1
    same_td *= doubled()
    same_td -= 0.5
    same_td /= 2
    same_td **= 2
    assert same is store
    assert difference(td, store.to_tensordict()) is None


def test_arguments_when_they_are_stores_then_their_content_counts(local_client: tdserve.Client, name: str) -> None:
    first, second = local_client.memmap(local_td(), name), local_client.memmap(doubled(), name + "-2")
    assert difference(local_td() + doubled(), first + second) is None
    assert bool((first == first).all())
    assert not bool((first == second).any())
    first.update_(second.select("a"))
    assert torch.equal(first["a"], doubled()["a"])
    first[1] = second[1]
    first.copy_at_(second, ...)
    assert difference(doubled(), first.to_tensordict()) is None
    assert difference(doubled().where(mask(), local_td()), first.where(mask(), local_td())) is None


def test_store_when_in_a_set_or_dict_then_it_is_itself(store: Any, local_client: tdserve.Client) -> None:
    again = local_client[store.name]
    assert {store: 1}[store] == 1
    assert len({store, again}) == 2


def test_store_when_asked_for_its_truth_then_refused_as_a_tensordict_does(store: Any) -> None:
    with pytest.raises(RuntimeError):
        bool(local_td())
    with pytest.raises(tdserve.NotSupportedError, match="is_empty") as raised:
        bool(store)
    assert isinstance(raised.value, RuntimeError)


REFUSALS: dict[str, Call] = {
    "apply": lambda each: each.apply(lambda x: x.zero_(), inplace=True),
    "flatten_keys": lambda each: each.flatten_keys(".", True),
    "batch_size": lambda each: setattr(each, "batch_size", [4]),
    "names": lambda each: setattr(each, "names", ["p", "q"]),
    "entry": lambda each: TensorDict({"deep": each}, [4]),
    "setitem": lambda each: doubled().set("deep", each),
    "right of a local one": lambda each: doubled() + each,
    "where": lambda each: doubled().where(mask(), each),
}


@pytest.mark.parametrize("call", list(REFUSALS.values()), ids=list(REFUSALS))
def test_call_when_it_cannot_reach_the_store_then_refused_and_nothing_changes(store: Any, call: Call) -> None:
    with pytest.raises(tdserve.NotSupportedError):
        call(store)
    assert difference(local_td(), store.to_tensordict()) is None


def test_structure_when_asked_then_nothing_is_fetched(local_client: tdserve.Client, name: str) -> None:
    """A store that is deleted can be asked no more."""
    td = local_td().update({"text": "one"})
    store: Any = local_client.memmap(td, name)
    local_client.delete(name)
    asked: list[Callable[[Any], Any]] = [
        lambda each: each.is_empty(),
        lambda each: each.dim(),
        lambda each: each.batch_dims,
        lambda each: each.depth,
        lambda each: each.size(),
        lambda each: each.numel(),
        lambda each: each.dtype,
        lambda each: each.requires_grad,
        lambda each: each.get_item_shape("a"),
        lambda each: each.is_contiguous(),
        lambda each: (each.is_cpu, each.is_cuda, each.is_meta),
        lambda each: list(each.sorted_keys),
        lambda each: each.empty().batch_size,
        lambda each: each.select("a").batch_size,
        lambda each: list(each.exclude("a").keys(True)),
        lambda each: each.view(-1).names,
        lambda each: len(each.split(2)),
    ]
    for ask in asked:
        assert ask(store) == ask(td)
    assert "text: NonTensorData" in repr(store)
    with pytest.raises(tdserve.StoreNotFoundError):
        store.sum()


def test_values_when_ragged_then_methods_work_too(local_client: tdserve.Client, name: str) -> None:
    td = tensordict.lazy_stack([TensorDict({"x": torch.ones(size), "t": "text"}) for size in (1, 2, 3)])
    store: Any = local_client.memmap(td, name)
    assert store.numel() == td.numel()
    store.zero_()
    assert [row["x"].sum().item() for row in store.to_tensordict().unbind(0)] == [0, 0, 0]
    assert store.select("x")[1]["x"].shape == (2,)
    assert [part["x"].shape for part in store.unbind(0)] == [(1,), (2,), (3,)]
    assert store.select("x").batch_size == store.batch_size == td.batch_size
    assert store.get_non_tensor("t") == td.get_non_tensor("t")
    store.set_non_tensor("t", "new")
    assert store[0]["t"] == "new"


IN_THE_WAY: dict[str, Callable[[Any], object]] = {
    "where": lambda store: local_td().where(mask(), local_td(), out=store),
    "apply": lambda store: local_td().apply(lambda leaf: leaf, out=store),
    "named_apply": lambda store: local_td().named_apply(lambda _name, leaf: leaf, out=store),
    "pad": lambda store: tensordict.pad(store, [0, 1]),
}


@pytest.mark.parametrize("call", list(IN_THE_WAY.values()), ids=list(IN_THE_WAY))
def test_store_when_tensordict_needs_a_local_one_then_the_error_names_what_to_pass(
    store: Any, call: Callable[[Any], object]
) -> None:
    with pytest.raises(tdserve.UnsupportedAttributeError, match=r"to_tensordict\(\)"):
        call(store)
    assert difference(local_td(), store.to_tensordict()) is None


def test_update_when_a_value_is_none_then_refused_with_what_to_do(store: Any) -> None:
    key = next(iter(store.keys()))
    with pytest.raises(tdserve.SpecMismatchError, match=r"got None: a key keeps its kind; remove it with del_\(\)"):
        store.update({key: None})


def test_view_when_used_in_a_with_statement_then_what_is_written_into_it_is_in_the_store(store: Any) -> None:
    key = next(key for key, leaf in store.items() if isinstance(leaf, torch.Tensor))
    with store.unsqueeze(0) as view:
        view.set_(key, torch.ones_like(view[key]))
    assert bool((store[key] == 1).all())
