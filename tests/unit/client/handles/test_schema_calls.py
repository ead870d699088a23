from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    InvalidRequestError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    SpecMismatchError,
)
from tests.errors import raises
from tests.sameness import difference
from tests.unit.client.three_rows import local

STEPS: dict[str, Callable[[Any], object]] = {
    "setitem": lambda td: td.__setitem__("z", torch.ones(3)),
    "setitem nested": lambda td: td.__setitem__(("n", "z"), torch.ones(3, 4)),
    "set below new nodes": lambda td: td.set(("k", "l", "m"), torch.ones(3)),
    "set a text": lambda td: td.set("z", "a text"),
    "set a dict": lambda td: td.set("z", {"y": torch.ones(3), "x": "text"}),
    "set an existing one": lambda td: td.set("a", torch.ones(3, 2)),
    "set_non_tensor": lambda td: td.set_non_tensor("z", [1, 2, 3]),
    "set_non_tensor over one": lambda td: td.set_non_tensor(("n", "t"), {"b": 1}),
    "setdefault": lambda td: [td.setdefault("z", torch.ones(3)), td.setdefault("a", torch.ones(3, 2))],
    "create_nested": lambda td: td.create_nested("z"),
    "create_nested deep": lambda td: td.create_nested(("y", "z")),
    "create_nested over one": lambda td: td.create_nested("n"),
    "pop": lambda td: [td.pop("a"), td.pop("q", None), td.pop(("n", "q"), 3)],
    "del": lambda td: td.__delitem__("n"),
    "del_": lambda td: td.del_(("n", "c")),
    "clear": lambda td: td.clear(),
    "rename_key_": lambda td: td.rename_key_("a", "b"),
    "rename_key_ into a node": lambda td: td.rename_key_("a", ("n", "a")),
    "rename_key_ over one": lambda td: td.rename_key_(("n", "t"), "a"),
    "rename_key_ of a node": lambda td: td.rename_key_("n", "m"),
    "update": lambda td: td.update({"z": torch.ones(3), "a": torch.ones(3, 2), "n": {"t": "other", "u": "new"}}),
    "update with a tensordict": lambda td: td.update(TensorDict({"n": {"z": torch.ones(3)}, "y": {}}, [3])),
    "update of existing ones": lambda td: td.update({"a": torch.ones(3, 2), ("n", "c"): torch.ones(3).long()}),
    "update of some": lambda td: td.update({"z": torch.ones(3), "y": torch.ones(3)}, keys_to_update=["y"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_step_when_done_then_the_store_is_what_the_tensordict_is(
    client: tdserve.Client, handle: tdserve.StoreHandle, step: Callable[[Any], object]
) -> None:
    td, other = local(), client[handle.name]
    step(td)
    step(handle)
    for found in (handle.to_tensordict(), other.to_tensordict(), client.from_remote_init(handle.name)):
        assert difference(td, found) is None
    assert sorted(map(str, other.keys(True))) == sorted(map(str, td.keys(True)))


def test_popitem_when_there_are_entries_then_the_last_one(handle: tdserve.StoreHandle) -> None:
    key, value = handle.popitem()
    assert (key, value["c"].tolist()) == ("n", [0, 1, 2])
    assert handle.keys() == ["a"]
    handle.popitem()
    with pytest.raises(KeyNotFoundError, match="has no keys"):
        handle.popitem()


@pytest.mark.parametrize("call", [lambda h: h.pop("q"), lambda h: h.del_("q"), lambda h: h.rename_key_("q", "r")])
def test_call_when_there_is_no_such_key_then_key_error(
    handle: tdserve.StoreHandle, call: Callable[[Any], object]
) -> None:
    with raises(KeyNotFoundError, key="q"):
        call(handle)


def test_update_when_in_place_then_no_key_comes(handle: tdserve.StoreHandle) -> None:
    for values in ({"z": torch.ones(3)}, {"a": torch.ones(3, 2), "z": torch.ones(3)}):
        with raises(KeyNotFoundError, key="z"):
            handle.update_(values)
    assert difference(local(), handle.to_tensordict()) is None


def test_rename_when_safe_then_nothing_is_replaced(handle: tdserve.StoreHandle) -> None:
    with pytest.raises(KeyExistsError) as raised:
        handle.rename_key_("a", "n", safe=True)
    assert isinstance(raised.value, KeyError)
    assert difference(local(), handle.to_tensordict()) is None


@pytest.mark.parametrize("value", [torch.ones(4), torch.tensor(1.0), 3, TensorDict({"x": torch.ones(2)}, [2])])
def test_set_when_the_batch_size_is_another_then_refused(handle: tdserve.StoreHandle, value: Any) -> None:
    with pytest.raises(SpecMismatchError, match=r"'z'.*batch size \[3\]"):
        handle["z"] = value
    assert "z" not in handle


def test_set_when_rows_differ_in_structure_then_not_supported(client: tdserve.Client, name: str) -> None:
    rows = [TensorDict({"a": torch.zeros(2)}), TensorDict({"b": torch.zeros(3)})]
    handle = client.memmap(TensorDict.lazy_stack(rows), name)
    with pytest.raises(NotSupportedError, match="differ"):
        handle["z"] = torch.ones(2)


def test_select_when_in_place_then_the_others_go(handle: tdserve.StoreHandle) -> None:
    handle.select(("n", "c"), inplace=True)
    assert handle.keys(True) == [("n", "c"), "n"]
    with pytest.raises(KeyNotFoundError):
        handle.select("q", inplace=True)
    handle.select(("n", "c"), "q", inplace=True, strict=False)
    handle.exclude("q", ("n", "c"), inplace=True)
    assert handle.keys(True) == ["n"]


def test_update_when_there_is_nothing_to_take_keys_from_then_refused(handle: tdserve.StoreHandle) -> None:
    handle.update(None)
    with pytest.raises(InvalidRequestError, match="int has no keys"):
        handle.update(3)
