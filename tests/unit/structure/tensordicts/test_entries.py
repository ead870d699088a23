from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict
from tensordict.nn import TensorDictParams

from tdserve.structure.tensordicts.entries import (
    change_tensors,
    enliven,
    exchange_tensors,
    get_entry,
    name_dims,
    put_in_order,
)
from tdserve.structure.tensordicts.live_values import LiveNonTensorData, LiveNonTensorStack
from tests.conformance.kinds_classes import Frozen
from tests.unit.structure.memory_source import Cell, MemorySource


class Named(TensorClass):
    """A tensorclass with a non-tensor field."""

    x: torch.Tensor
    name: str


def source(value: Any = "new") -> MemorySource:
    """A source of two rows."""
    return MemorySource(Cell(NonTensorData(value, batch_size=[2])))


def test_enliven_when_entries_are_single_or_stacks_then_each_becomes_its_kind() -> None:
    td = TensorDict(
        {"a": {"s": NonTensorData("old", batch_size=[2])}, "st": NonTensorStack("p", "q")}, [2], names=["t"]
    )
    assert enliven(td, {("a", "s"): source(), ("st",): source()}) is td
    assert type(td.get(("a", "s"))) is LiveNonTensorData
    assert type(td.get("st")) is LiveNonTensorStack
    assert (td["a", "s"], td["st"], td.get("st").names) == ("new", ["new", "new"], ["t"])


def test_enliven_when_a_key_is_missing_or_a_tensor_then_leaves_it() -> None:
    td = TensorDict({"x": torch.zeros(2)}, [2])
    enliven(td, {("x",): source(), ("y",): source(), ("z", "y"): source()})
    assert list(td.keys()) == ["x"]
    assert torch.equal(td["x"], torch.zeros(2))


def test_enliven_when_a_field_of_a_tensorclass_then_the_attribute_is_live() -> None:
    row = Named(x=torch.zeros(2), name="old", batch_size=[2])
    enliven(row, {("name",): source()})
    assert row.name == "new"
    assert row[1].name == "new"


@pytest.mark.parametrize("dim", [0, 1])
def test_enliven_when_in_a_lazy_stack_then_each_row_has_its_part(dim: int) -> None:
    below: list[Any] = [["a", "b"], ["c", "d"]]
    there = MemorySource(Cell(NonTensorStack.from_list(below)))
    rows = [
        TensorDict({"x": torch.zeros(2, size), "n": {"s": NonTensorStack("old", "old")}, "none": "old"}, [2])
        for size in (2, 3)
    ]
    td = TensorDict({"stack": TensorDict.lazy_stack(rows, dim)}, [2])
    enliven(td, {("stack", "n", "s"): there, ("stack", "missing"): there, ("stack", "x"): there})
    assert td["stack"].get(("n", "s")).tolist() == below
    assert td["stack"].get("none").tolist() == [["old", "old"], ["old", "old"]]
    newer: list[Any] = [["e", "f"], ["g", "h"]]
    there.write(NonTensorStack.from_list(newer))
    assert td["stack"].get(("n", "s")).tolist() == newer
    assert rows[1]["n", "s"] == (["g", "h"] if dim == 0 else ["f", "h"])


def test_exchange_when_there_are_parameters_and_other_kinds_then_only_plain_tensors_go() -> None:
    new: dict[tuple[str, ...], torch.Tensor] = {(key,): torch.ones(2) for key in ("x", "p", "s", "missing")}
    td = TensorDict({"x": torch.zeros(2), "p": torch.nn.Parameter(torch.zeros(2)), "s": "text"}, [])
    assert exchange_tensors(td, new) is td
    assert td["x"] is new["x",]
    assert not td["p"].any()
    assert (td["s"], "missing" in td) == ("text", False)


def test_entry_at_when_in_a_tensorclass_then_the_entry_itself() -> None:
    td = TensorDict({"row": Named(x=torch.zeros(2), name="old", batch_size=[2])}, [2])
    enliven(td, {("row", "name"): source()})
    assert type(get_entry(td, ("row", "name"))) is LiveNonTensorData
    assert type(get_entry(td, ("row",))) is Named


def test_entry_at_when_in_a_lazy_stack_then_as_get() -> None:
    td = TensorDict.lazy_stack([TensorDict({"s": value}, []) for value in "pq"])
    assert get_entry(td, ("s",)).tolist() == ["p", "q"]


def test_change_when_tensors_are_held_in_every_way_then_all_of_them_and_nothing_else() -> None:
    rows = TensorDict.lazy_stack([TensorDict({"x": torch.zeros(size), "s": "text"}, []) for size in (1, 2)])
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}, []), no_convert=True)
    named = Named(x=torch.zeros(2), name="n", batch_size=[2])
    td = TensorDict({"a": {"b": torch.zeros(2)}, "rows": rows, "named": named, "st": NonTensorStack("p", "q")}, [2])
    assert change_tensors(td.lock_(), lambda tensor: tensor + 1) is td
    assert [row["x"].sum().item() for row in td["rows"].unbind(0)] == [1, 2]
    assert (td["a", "b"].tolist(), td["named"].x.tolist(), td["named"].name) == ([1, 1], [1, 1], "n")
    assert (td["st"], td["rows"][0]["s"], td.is_locked) == (["p", "q"], "text", True)
    changed = change_tensors(params, lambda tensor: torch.nn.Parameter(tensor + 1))
    assert type(changed) is TensorDictParams
    assert changed["w"].tolist() == [1, 1]


def test_name_dims_when_an_instance_is_frozen_then_what_it_is_around_is_named() -> None:
    found: Any = Frozen(x=torch.zeros(2, 3), batch_size=[2, 3])
    name_dims(found, ("time",))
    assert found.names == ["time", None]


def test_put_in_order_when_nested_then_the_order_of_the_other_at_every_depth() -> None:
    like = TensorDict({"b": 1, "n": {"y": 1, "x": 2}, "gone": 1, "a": 2})
    td = TensorDict({"a": 3, "more": 1, "n": {"x": 4, "y": 5}, "b": 6})
    assert put_in_order(td, like) is td
    assert list(td.keys()) == ["b", "n", "a", "more"]
    assert list(td["n"].keys()) == ["y", "x"]
    assert (int(td["n", "x"]), int(td["a"])) == (4, 3)
