"""The memmap family by store name: every keyword of the installed signatures, and the documentation's examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, dense_stack_tds, pad
from torch._subclasses import FakeTensorMode

import tdserve
from tdserve.base.errors import NotSupportedError, StoreExistsError
from tests.sameness import difference

pytestmark = pytest.mark.integration

ARCHIVES = pytest.raises(NotSupportedError, match=r"archive|compression")

SAVING: dict[str, list[Any]] = {
    "copy_existing": [True, None],
    "num_threads": [0, 2],
    "return_early": [False, True],
    "share_non_tensor": [False, True],
    "robust_key": [True, False, None],
}
"""Keyword -> values that work."""

FILES: dict[str, list[Any]] = {"archive": [None, False], "compression": [None]}

WORKING: dict[str, dict[str, list[Any]]] = {
    "memmap": {**SAVING, **FILES, "existsok": [False, True], "atomic": [False, True]},
    "memmap_": {**SAVING, "existsok": [False, True], "atomic": [False, True]},
    "memmap_like": {**SAVING, "copy_existing": [False, True], "archive": [None, False], "existsok": [False, True]},
    "save": {**SAVING, **FILES, "atomic": [False, True]},
    "dumps": {**SAVING, **FILES, "atomic": [False, True]},
    "load_memmap": {
        "device": [None, "cpu", torch.device("cpu"), "meta"],
        "non_blocking": [False, True],
        "out": [None, TensorDict()],
        "robust_key": [True, False, None],
        "subpath": [None, "n", ("n",)],
        "mode": [None, "r"],
        "num_threads": [0, 2],
        "allow_pickle": [None, False, True],
    },
    "load_memmap_": {"robust_key": [True, False, None], "allow_pickle": [None, False, True], "mode": [None, "r"]},
    "memmap_refresh_": {"allow_pickle": [None, False, True]},
}
"""Method -> keyword -> values that work."""

REFUSED: dict[str, dict[str, list[Any]]] = {
    "memmap": {"archive": [True], "compression": ["deflate", 0]},
    "memmap_like": {"archive": [True]},
    "save": {"archive": [True], "compression": ["deflate"]},
    "dumps": {"archive": [True], "compression": ["deflate"]},
}
"""Method -> keyword -> values that raise NotSupportedError with the reason."""


def content() -> TensorDict:
    """Tensors and values on two levels."""
    return TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"t": "text", "x": torch.ones(3)}}, [3])


def call(client: tdserve.Client, method: str, name: str, **options: Any) -> Any:
    """Calls a method of the family as its kind requires; returns the result, also if that is in a future."""
    if method == "load_memmap":
        found = client.load_memmap(name, **options)
    elif method == "memmap_refresh_":
        found = client.memmap_refresh_(client.memmap_(content(), f"{name}-{len(client.stores())}"), **options)
    else:
        found = getattr(client, method)(content(), name, **options)
    if options.get("return_early"):
        found = found.result()
    return found


@pytest.mark.parametrize("method", WORKING)
def test_keywords_when_tensordict_has_them_then_each_is_known_here(method: str) -> None:
    theirs = set(inspect.signature(getattr(TensorDict, method)).parameters) - {"self", "prefix"}
    assert theirs == set(WORKING[method]), "a keyword that tensordict has added, or dropped"
    ours = set(inspect.signature(getattr(tdserve.Client, method)).parameters)
    assert theirs <= ours


@pytest.mark.parametrize("function", ["memmap", "save", "load_memmap", "load"])
def test_keywords_when_of_tensordicts_functions_then_the_methods_have_them(function: str) -> None:
    theirs = set(inspect.signature(getattr(tensordict, function)).parameters) - {"data", "prefix"}
    assert theirs <= set(inspect.signature(getattr(tdserve.Client, function)).parameters)


@pytest.mark.parametrize(
    "method",
    ["make_memmap", "make_memmap_from_tensor", "make_memmap_from_storage", "load_memmap_", "memmap_refresh_"],
)
def test_keywords_when_of_memory_mapped_tensordicts_then_a_handle_has_them(method: str) -> None:
    theirs = set(inspect.signature(getattr(TensorDict, method)).parameters) - {"prefix"}
    assert theirs <= set(inspect.signature(getattr(tdserve.StoreHandle, method)).parameters)


@pytest.mark.parametrize("alias", ["load", "load_"])
def test_keywords_when_tensordict_passes_them_on_then_so_do_we(alias: str) -> None:
    kinds = {each.kind for each in inspect.signature(getattr(TensorDict, alias)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds, "an alias that has become a method of its own"
    ours = {"load": tdserve.Client.load_memmap, "load_": tdserve.Client.load_memmap_}
    assert getattr(tdserve.Client, alias) is ours[alias]


@pytest.mark.parametrize(("method", "keyword"), [(each, word) for each, words in WORKING.items() for word in words])
def test_keyword_when_given_then_it_works(client: tdserve.Client, name: str, method: str, keyword: str) -> None:
    for number, value in enumerate(WORKING[method][keyword]):
        own = name if method.startswith("load") else f"{name}{number}"
        if method.startswith("load") and own not in client:
            client.memmap(content(), own)
        found = call(client, method, own, **{keyword: value})
        expected = content()["n"] if keyword == "subpath" and value else content()
        if method == "memmap_like":
            assert not found["a"].any()
        elif keyword == "device" and str(value) == "meta":
            assert found["a"].is_meta
        else:
            found = found.to_tensordict() if isinstance(found, tdserve.StoreHandle) else found.clone()
            assert set(found.keys(True)) == set(expected.keys(True))
            assert all(found[key].equal(leaf) for key, leaf in expected.items(True, True))


@pytest.mark.parametrize(("method", "keyword"), [(each, word) for each, words in REFUSED.items() for word in words])
def test_keyword_when_it_cannot_work_then_refused_with_the_reason(
    client: tdserve.Client, name: str, method: str, keyword: str
) -> None:
    for value in REFUSED[method][keyword]:
        with pytest.raises(NotSupportedError, match=r"store is a folder.*save"):
            call(client, method, name, **{keyword: value})
    assert name not in client


@pytest.mark.parametrize("save", ["memmap", "memmap_", "memmap_like", "save", "dumps"])
def test_saving_when_the_name_is_taken_then_refused_unless_allowed(
    client: tdserve.Client, name: str, save: str
) -> None:
    method: Callable[..., Any] = getattr(client, save)
    method(content(), name)
    with pytest.raises(StoreExistsError):
        method(content(), name)
    for word in ("existsok", "exists_ok"):
        method(content(), name, **{word: True})


# ---------------------------------------------------------------------------- the examples of the documentation


def test_example_of_load_memmap_when_by_name_then_equal_and_nested(client: tdserve.Client, name: str) -> None:
    td = TensorDict.fromkeys(["a", "b", "c", ("nested", "e")], 0)
    client.memmap(td, name)
    td_load = client.load_memmap(name)
    assert (td == td_load).all()
    nested = client.load_memmap(name, subpath="nested")
    assert nested["e"] == 0
    assert client.load_memmap(f"{name}/nested")["e"] == 0  # as a folder in a folder


def test_example_of_meta_and_fake_when_by_name_then_structure_without_content(
    client: tdserve.Client, name: str
) -> None:
    td = TensorDict({"a": torch.zeros(()), "b": {"c": torch.zeros(())}})
    client.save(td, name)
    td_load = client.load_memmap(name, device="meta")
    assert td_load.device == td_load["b"].device == torch.device("meta")
    assert td_load["a"].is_meta
    assert td_load["b", "c"].is_meta
    with FakeTensorMode():
        td_load = client.load_memmap(name)
    assert type(td_load["b", "c"]).__name__ == "FakeTensor"
    assert td_load["a"].shape == torch.Size([])


def test_example_of_memmap_like_when_expanded_then_a_buffer_to_fill(client: tdserve.Client, name: str) -> None:
    row = TensorDict(
        {"a": torch.zeros((3, 64, 64), dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.int64)}, batch_size=[]
    )
    buffer = client.memmap_like(row.expand(1_000), name)
    assert buffer["a"].shape == torch.Size([1000, 3, 64, 64])
    buffer[3:5] = row.expand(2).clone().fill_("b", 1)
    assert buffer["b"].sum() == 2


def test_example_of_memmap__when_by_name_then_itself_and_locked(client: tdserve.Client, name: str) -> None:
    td = TensorDict(obs=torch.zeros(3, 4), batch_size=[3])
    out = client.memmap_(td, name)
    assert (out is td, td.is_locked) == (True, True)


def test_example_of_load_memmap__when_by_name_then_its_keys_alone(client: tdserve.Client, name: str) -> None:
    client.save(TensorDict(a=torch.ones(3)), name)
    td = TensorDict(a=torch.zeros(3), b=torch.zeros(3))
    out = client.load_memmap_(td, name)
    assert (out is td, list(td.keys()), td["a"].tolist()) == (True, ["a"], [1.0, 1.0, 1.0])


def test_example_of_refresh_when_the_store_was_made_anew_then_its_keys(client: tdserve.Client, name: str) -> None:
    td = client.memmap_(TensorDict(a=torch.zeros(3)), name)
    client.delete(name)
    client.memmap(TensorDict(a=torch.ones(3), b=torch.ones(3)), name)
    client.memmap_refresh_(td)
    assert (sorted(td.keys()), td["a"].tolist()) == (["a", "b"], [1.0, 1.0, 1.0])


def test_example_of_return_early_when_by_name_then_a_future(client: tdserve.Client, name: str) -> None:
    td = TensorDict(a=torch.zeros(3), b=torch.ones(3), batch_size=[3])
    future = client.memmap(td, name, num_threads=2, return_early=True)
    assert future.result()["b"].tolist() == [1.0, 1.0, 1.0]


def test_example_of_consolidate_when_of_what_comes_back_then_one_storage_and_its_file(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    client.memmap(content(), name)
    consolidated = client.load_memmap(name).consolidate(filename=tmp_path / "td.bin")
    pointers = {leaf.untyped_storage().data_ptr() for leaf in consolidated.values(True, True)}
    assert len(pointers) == 1
    ways: list[Any] = [TensorDict, tensordict]
    for way in ways:
        back = way.from_consolidated(tmp_path / "td.bin")
        assert (back["a"] == content()["a"]).all()
        client.memmap(back, name, exists_ok=True)
    client.memmap(consolidated, name, exists_ok=True)
    assert difference(content(), client.load_memmap(name)) is None


def test_example_of_to_module_when_of_what_comes_back_then_the_module_computes_with_it(
    client: tdserve.Client, name: str
) -> None:
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    client.memmap(TensorDict.from_module(module), name)
    x = torch.rand(4, 3)
    with client.load_memmap(name).to_module(other):
        assert torch.equal(other(x), module(x))
    assert not torch.equal(other(x), module(x))


def test_example_of_pad_and_dense_stack_when_of_what_comes_back_then_as_of_the_original(
    client: tdserve.Client, name: str
) -> None:
    td = TensorDict({"a": torch.ones(3, 4), "b": torch.ones(3, 4, 1)}, [3, 4])
    client.memmap(td, name)
    padded = pad(client.load_memmap(name), [0, 1, 0, 2], value=0.0)
    assert difference(pad(td, [0, 1, 0, 2], value=0.0), padded) is None
    rows = [TensorDict({"a": torch.full((2,), float(number))}, [2]) for number in range(3)]
    client.memmap(tensordict.lazy_stack(rows), f"{name}-stack")
    back = client.load_memmap(f"{name}-stack")
    assert type(back) is type(tensordict.lazy_stack(rows))
    assert difference(dense_stack_tds(rows, 0), dense_stack_tds(back)) is None
