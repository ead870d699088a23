from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.building.replace_content import take_over
from tests.sameness import difference


class Named(TensorClass):
    """A tensorclass with a non-tensor field."""

    x: torch.Tensor
    name: str


class Other(TensorClass):
    """Another one."""

    x: torch.Tensor


def rows(*sizes: int, key: str = "x") -> Any:
    """A lazy stack of rows of these sizes."""
    return lazy_stack([TensorDict({key: torch.full((size,), float(size)), "s": "v"}, []) for size in sizes])


def differences(left: Any, right: Any) -> list[str | None]:
    """Returns the differences between the rows of two lazy stacks."""
    assert (left.batch_size, left.stack_dim) == (right.batch_size, right.stack_dim)
    found = [difference(mine, other) for mine, other in zip(left.tensordicts, right.tensordicts, strict=True)]
    return [each for each in found if each]


def test_take_over_when_structures_differ_then_equal_and_nested_ones_stay_the_same_objects() -> None:
    td = TensorDict(
        {"a": torch.zeros(3), "gone": torch.ones(3), "n": {"x": torch.zeros(3), "gone": torch.zeros(3)}}, [3]
    )
    new = TensorDict(
        {"a": torch.ones(2, 4), "b": "text", "n": {"y": torch.ones(2)}, "m": {"z": torch.ones(2)}}, [2], names=["t"]
    )
    inner = td["n"]
    assert take_over(td, new) is td
    assert td["n"] is inner
    assert difference(new, td) is None


def test_take_over_when_the_other_is_locked_then_nothing_is() -> None:
    td, new = TensorDict({"n": {"x": torch.zeros(2)}}, [2]), TensorDict({"n": {"y": 1}, "m": {"x": 1}}, []).lock_()
    take_over(td, new)
    assert not any(each.is_locked for each in (td, td["n"], td["m"]))


def test_take_over_when_leaves_fit_then_they_are_replaced_all_the_same() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    old, new = td["a"], TensorDict({"a": torch.ones(3)}, [3])
    take_over(td, new)
    assert td["a"] is new["a"]
    assert torch.equal(old, torch.zeros(3))


def test_take_over_when_it_has_a_device_then_everything_comes_to_it() -> None:
    td = TensorDict({"n": {"x": torch.zeros(3)}}, [3], device="meta")
    take_over(td, TensorDict({"m": {"x": torch.ones(2)}}, [2]))
    assert (td.device, td["m"].device, td["m", "x"].is_meta) == (torch.device("meta"), torch.device("meta"), True)


def test_take_over_when_tensorclasses_then_fields_of_all_kinds_come_over() -> None:
    td, new = Named(x=torch.zeros(2), name="old", batch_size=[2]), Named(x=torch.ones(3), name="new", batch_size=[3])
    assert take_over(td, new) is td
    assert difference(new, td) is None
    take_over(td, TensorDict({"x": torch.zeros(1), "name": NonTensorData("in", batch_size=[1])}, [1]))
    assert (td.name, td.batch_size) == ("in", torch.Size([1]))


def test_take_over_when_lazy_stacks_then_rows_stay_where_there_are_as_many() -> None:
    td, new = rows(1, 2), rows(3, 4, key="y")
    first = td.tensordicts[0]
    take_over(td, new)
    assert td.tensordicts[0] is first
    assert not differences(new, td)
    longer = rows(1, 2, 3)
    take_over(td, longer)
    assert not differences(longer, td)


def test_take_over_when_nested_kinds_differ_then_the_entry_is_replaced() -> None:
    td = TensorDict({"n": {"x": torch.zeros(2)}, "m": torch.zeros(2)}, [2])
    new = TensorDict({"n": rows(1, 2), "m": {"x": torch.zeros(2)}}, [2])
    take_over(td, new)
    assert td["n"] is new["n"]
    assert td["m"] is new["m"]


@pytest.mark.parametrize(
    ("td", "source"),
    [
        (TensorDict({"x": torch.zeros(2)}, [2]), rows(1, 2)),
        (rows(1, 2), TensorDict({"x": torch.zeros(2)}, [2])),
        (Other(x=torch.zeros(2), batch_size=[2]), Named(x=torch.zeros(2), name="n", batch_size=[2])),
        (TensorDict({"x": torch.zeros(2)}, [2]), Other(x=torch.zeros(2), batch_size=[2])),
    ],
)
def test_take_over_when_kinds_differ_then_refused_and_unchanged(td: Any, source: Any) -> None:
    before = td.clone()
    with pytest.raises(SpecMismatchError, match=r"store 'q'.*expected a"):
        take_over(td, source, store="q")
    assert list(td.keys()) == list(before.keys())
    assert torch.equal(td[0].get("x"), before[0].get("x"))


@pytest.mark.parametrize(
    "td", [TensorDict({"x": torch.zeros(2)}, [2]).lock_(), TensorDictParams(TensorDict({"x": torch.zeros(2)}, []))]
)
def test_take_over_when_entries_cannot_be_replaced_then_refused(td: Any) -> None:
    with pytest.raises(NotSupportedError, match="replacing"):
        take_over(td, TensorDict({"x": torch.ones(2)}, []))
    assert torch.equal(td["x"].detach(), torch.zeros(2))


def test_take_over_when_consolidated_then_it_is_so_no_more() -> None:
    td: Any = TensorDict({"x": torch.zeros(2)}, [2]).consolidate()
    assert td.is_consolidated()
    take_over(td.unlock_(), TensorDict({"y": torch.zeros(2)}, [2]))
    assert not td.is_consolidated()


def test_take_over_when_a_row_occurs_twice_in_a_stack_then_others_take_its_places() -> None:
    row = TensorDict({"x": torch.zeros(1)}, [])
    found = take_over(lazy_stack([row, row]), rows(1, 2))
    assert differences(found, rows(1, 2)) == []
