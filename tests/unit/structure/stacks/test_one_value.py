from __future__ import annotations

from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.stacks.elements import OneValue, with_one_value
from tdserve.structure.trees.nodes import Path
from tdserve.structure.trees.tree import Spec

ROW = TensorDict(
    {"one": NonTensorData(data="a", batch_size=[2]), "each": NonTensorStack("a", "a"), "n": {"v": "a"}}, [2]
)


def rows_of(stored: Spec, values: dict[Path, Any]) -> tuple[dict[Path, Any], Spec]:
    """Returns two rows as they are read: with a value for each element."""
    return values, stored.with_rows(2).with_values_per_row()


def stored_like(row: TensorDict) -> Spec:
    return capture(row).spec.prepend((7,))


def test_values_when_a_row_had_one_for_all_elements_then_it_has_one_again() -> None:
    stored = stored_like(ROW)
    column = [["a", "a"], ["b", "c"]]
    values, spec = rows_of(stored, {("one",): column, ("each",): column, ("n", "v"): [["x", "x"], ["y", "y"]]})
    found = with_one_value(values, spec, stored)
    assert found["one",] == [OneValue("a"), ["b", "c"]]
    assert found["each",] == column
    td = build(spec, {}, found)
    assert (td.get("one").batch_size, td.get("one").tolist()) == ((2, 2), column)
    assert type(td[0].get("one")) is NonTensorData
    assert (td[0].get("one").data, td[0].get("one").batch_size) == ("a", (2,))
    assert type(td[1].get("one")) is NonTensorStack
    assert type(td[0].get("each")) is NonTensorStack
    assert type(td[1].get(("n", "v"))) is NonTensorData


def test_values_when_they_differ_in_type_then_they_are_several() -> None:
    stored = stored_like(ROW)
    column = [[1, True], [0.0, -0.0]]
    values, spec = rows_of(stored, dict.fromkeys([("one",), ("each",), ("n", "v")], column))
    assert with_one_value(values, spec, stored)["one",] == column


def test_values_when_rows_have_no_elements_or_are_single_then_they_stay() -> None:
    empty = stored_like(TensorDict({"v": NonTensorData(data="a", batch_size=[0])}, [0]))
    values, spec = rows_of(empty, {("v",): [[], []]})
    assert with_one_value(values, spec, empty) == values
    single = stored_like(TensorDict({"v": "a"}, []))
    values, spec = rows_of(single, {("v",): ["a", "a"]})
    assert with_one_value(values, spec, single) is values
