from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from tensordict.nn import TensorDictParams

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, NotSupportedError, SpecMismatchError
from tdserve.client.handles.schema_changes import alter, capture_addition, find_unknown, merge_captures, split
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.altering import Alteration, Renaming
from tdserve.structure.trees.tree import Spec

TD = TensorDict({"a": torch.zeros(3), "n": TensorDict({"b": torch.zeros(3, 2)}, [3, 2]), "t": "text"}, [3])
SPEC = capture(TD).spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("z",), torch.ones(3, 2)),
        (("n", "z"), torch.ones(3, 2, 4)),
        (("m", "k", "z"), torch.ones(3)),
        (("z",), "text"),
        (("z",), NonTensorData([1, 2], batch_size=[3])),
        (("z",), {"x": torch.ones(3), "y": {"w": torch.ones(3, 1)}}),
        (("z",), TensorDict({"x": torch.ones(3, 2)}, [3, 2])),
        (("z",), TensorDict({}, [3])),
        (("n", "z"), torch.nn.Parameter(torch.ones(3, 2))),
        (("z",), torch.nn.Buffer(torch.ones(3), persistent=False)),
        (("z",), TensorDict({"x": torch.ones(3, requires_grad=True)}, [3]).lock_()),
        (("z",), TensorDictParams(TensorDict({"x": torch.ones(3)}, [3]))),
    ],
)
def test_addition_when_merged_then_the_structure_that_tensordict_makes(key: tuple[str, ...], value: Any) -> None:
    content = capture_addition(SPEC, {key: value}, store="x")
    expected = TD.clone().set(key, value)
    assert Alteration(added=content.spec).apply(SPEC).spec == capture(expected, is_exact=True).spec
    assert {*content.tensors, *content.values} == {path for path, _ in (*content.spec.tensors, *content.spec.values)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("z",), torch.ones(2)),
        (("n", "z"), torch.ones(3)),
        (("z",), 1.0),
        (("a", "z"), torch.ones(3)),
        (("z",), TensorDict({"x": torch.ones(4)}, [4])),
    ],
)
def test_addition_when_it_does_not_fit_then_refused_by_key(key: tuple[str, ...], value: Any) -> None:
    with pytest.raises(SpecMismatchError, match=f"'x', key .*{key[0]}"):
        capture_addition(SPEC, {key: value}, store="x")


def test_addition_when_one_value_is_meant_then_it_is_not_looked_into() -> None:
    content = capture_addition(SPEC, {("z",): [1, 2, 3]}, store="x", is_value=True)
    assert content.values == {("z",): [1, 2, 3]}
    assert not content.spec.values[0][1].per_row


def test_split_when_values_are_nested_then_leaf_by_leaf_as_far_as_the_store_has_nodes() -> None:
    new = TensorDict({"x": torch.ones(3)}, [3])
    values = {"a": 1, "n": {"b": 2, "c": 3}, ("n", "d"): 4, "z": new, ("q", "r"): 5, "t": NonTensorData("other")}
    known, fresh = split(SPEC, values)
    assert list(known) == [("a",), ("n", "b"), ("t",)]
    assert fresh == {("n", "c"): 3, ("n", "d"): 4, ("z",): new, ("q", "r"): 5}


def test_union_when_existing_leaves_come_along_then_in_the_structure_they_have() -> None:
    fresh = capture_addition(SPEC, {("n", "c"): torch.ones(3, 2)}, store="x")
    content = merge_captures(
        SPEC, {("a",): [7, 7, 7], ("n", "b"): torch.ones(3, 2), ("t",): "x"}, fresh, store="x", allow_pickle=False
    )
    keys = {("a",), ("n", "b"), ("n", "c"), ("t",)}
    assert {*content.tensors, *content.values} == keys
    altered = Alteration(added=content.spec, replaces=frozenset(keys - {("n", "c")})).apply(SPEC)
    assert altered.spec.find(("a",)) == SPEC.find(("a",))
    assert content.tensors["a",].tolist() == [7.0] * 3
    with pytest.raises(SpecMismatchError):
        merge_captures(SPEC, {("a",): torch.ones(3, 9)}, fresh, store="x", allow_pickle=False)


def test_alter_when_asked_for_then_done_together(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    content = capture_addition(SPEC, {("z",): torch.arange(3), ("s",): "text"}, store=name)
    deadline = Deadline.after(20.0)
    alter(
        client, name, content=content, removed=[("a",)], renamed=[Renaming(("n", "b"), ("n", "c"))], deadline=deadline
    )
    found = client.from_remote_init(name)
    assert list(found.keys(True, True)) == [("n", "c"), "z"]
    assert found["z"].tolist() == [0, 1, 2]
    assert found["s"] == found["t"] == "text"
    with pytest.raises(KeyNotFoundError):
        alter(client, name, removed=[("z",), ("q",)], deadline=deadline)
    assert "z" in client.keys(name)


def test_first_unknown_when_a_key_is_not_the_stores_then_that() -> None:
    assert find_unknown(SPEC, {"a": 1, "n": {"b": 2, "q": 3}, "z": 4}) == ("n", "q")
    assert find_unknown(SPEC, TD) is None
    assert find_unknown(SPEC, 3) is None


@tensorclass
class Scored:
    """A field that may come later."""

    a: torch.Tensor
    score: torch.Tensor | None = None


def test_addition_when_below_a_tensorclass_then_only_its_fields(client: tdserve.Client, name: str) -> None:
    make: Any = Scored
    client.init_remote(make(a=torch.zeros(3), batch_size=[3]), name)
    handle = client[name]
    handle["score"] = torch.ones(3)
    found = client.from_remote_init(name)
    assert isinstance(found, Scored)
    assert found.score is not None
    assert found.score.tolist() == [1.0] * 3
    changes: list[Any] = [lambda: handle.set("z", torch.ones(3)), lambda: handle.pop("a")]
    for change in changes:
        with pytest.raises(NotSupportedError, match="Scored"):
            change()


@pytest.mark.parametrize("more", [{}, {"b": torch.ones(1)}])
def test_split_when_rows_of_a_lazy_stack_differ_then_it_goes_as_a_whole(more: dict[str, torch.Tensor]) -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(2), **more})])
    spec = capture(TensorDict({"s": lazy_stack([TensorDict({"a": torch.ones(size)}) for size in (1, 2)])}, [2])).spec
    known, fresh = split(spec, {"s": stack, "new": 1})
    assert list(known) == [("s",)]
    assert known["s",] is stack
    assert fresh == {("new",): 1}
    known, fresh = split(Spec(spec.find(("s",))), stack)  # type: ignore[arg-type]  # a node
    assert (list(known), fresh) == ([()], {})
