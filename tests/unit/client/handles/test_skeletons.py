from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensordict
import torch
from hypothesis import given, settings
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client.handles.skeletons import get_skeleton
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec
from tests.tensordict_strategies import Inner, tensordicts


def spec_of(td: TensorDict) -> Spec:
    """The structure of a store with this content."""
    return capture(td, store="s").spec


@pytest.fixture
def spec() -> Spec:
    """Every kind of entry."""
    rows = tensordict.lazy_stack([TensorDict({"r": torch.ones(size)}) for size in (1, 2)])
    odd = tensordict.lazy_stack([TensorDict({"p": torch.ones(1)}), TensorDict({"q": torch.ones(1)})])
    deep = {"b": torch.zeros(2, 3, dtype=torch.uint8), "t": NonTensorData("text", batch_size=[2])}
    record = Inner(z=torch.zeros(2), tag="t", batch_size=[2])
    texts = NonTensorStack("a", "b")
    td = TensorDict({"n": deep, "rec": record, "each": texts, "lazy": rows, "odd": odd, "empty": {}}, [2], names=["x"])
    return spec_of(td)


def test_skeleton_when_made_then_has_the_structure_and_no_content(spec: Spec) -> None:
    skeleton = get_skeleton(spec)
    assert (skeleton.td.batch_size, skeleton.td.names) == ((2,), ["x"])
    assert skeleton.td["n", "b"].is_meta
    assert (skeleton.td["n", "b"].shape, skeleton.td["n", "b"].dtype) == ((2, 3), torch.uint8)
    assert type(skeleton.td["rec"]) is Inner
    assert get_skeleton(spec) is skeleton


def test_paths_when_asked_then_the_fewest_that_have_it_all(spec: Spec) -> None:
    skeleton = get_skeleton(spec)
    assert skeleton.list_paths(()) == [()]
    assert skeleton.list_paths(("n",)) == [("n",)]
    assert skeleton.list_paths(("n", "b")) == [("n", "b")]
    assert skeleton.list_paths(("odd", "p")) == [("odd",)]
    assert skeleton.list_paths(("empty",)) == [("empty",)]
    some = skeleton._replace(sources=skeleton.sources.exclude(("n", "t"), "rec"))
    assert sorted(some.list_paths(())) == [("each",), ("empty",), ("lazy",), ("n", "b"), ("odd",)]
    assert skeleton._replace(sources=skeleton.sources.select()).list_paths(()) == []


def test_hollow_when_all_leaves_of_a_node_are_gone_then_that_node(spec: Spec) -> None:
    skeleton = get_skeleton(spec)
    assert skeleton.list_hollow_nodes() == []
    some = skeleton._replace(sources=skeleton.sources.select("n").exclude(("n", "b"), ("n", "t")))
    assert some.list_hollow_nodes() == some.list_hollow_nodes(("n",)) == [("n",)]
    assert some._replace(sources=skeleton.sources).list_hollow_nodes(("n", "b")) == []


def test_spec_when_nothing_was_done_then_leaves_are_the_same(spec: Spec) -> None:
    found = get_skeleton(spec).make_spec()
    for path in [("n", "b"), ("n", "t"), ("rec", "z"), ("each",), ("lazy", "r")]:
        assert found.find(path) == spec.find(path)
    assert found.keys(True) == spec.keys(True)
    assert found.root.names == ("x",)


def test_spec_when_arranged_then_has_the_new_batch_size(spec: Spec) -> None:
    skeleton = get_skeleton(spec)
    found = skeleton._replace(td=skeleton.td.unsqueeze(0)).make_spec()
    assert found.batch_size == (1, 2)
    assert [leaf.batch_size for _, leaf in found.values] == [(1, 2)] * len(found.values)
    assert [leaf.ragged for path, leaf in found.values if path == ("lazy", "r")] == [
        dict(spec.values)["lazy", "r"].ragged
    ]


def test_leaves_when_listed_then_each_with_what_is_stored(spec: Spec) -> None:
    skeleton = get_skeleton(spec)
    flat = skeleton._replace(sources=skeleton.sources.flatten_keys("."))
    assert dict(flat.iter_leaves())[("n.b",)] == ("n", "b")


STEPS: dict[str, Callable[[Any], Any]] = {
    "unsqueeze": lambda td: td.unsqueeze(0),
    "reshape": lambda td: td.reshape(-1),
    "flatten_keys": lambda td: td.flatten_keys("|"),
    "exclude": lambda td: td.exclude(*list(td.keys())[:1]),
    "select": lambda td: td.select(*list(td.keys(True))[:2]),
    "transpose": lambda td: td.transpose(0, -1),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(td=tensordicts())
def test_skeleton_when_of_any_tensordict_then_steps_do_to_it_what_they_do_to_that(td: Any) -> None:
    skeleton = get_skeleton(spec_of(td))
    for step in STEPS.values():
        try:
            expected = step(td)
        except (RuntimeError, ValueError, IndexError, KeyError, NotImplementedError, TypeError):
            continue
        found = step(skeleton.td)
        assert type(found) is type(expected)
        assert (found.batch_size, found.names) == (expected.batch_size, expected.names)
        assert set(found.keys(True)) == set(expected.keys(True))
