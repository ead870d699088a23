"""Captures in the form of a given structure, and values that were encoded before."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import EncodedValues, conform, share_spec
from tdserve.structure.trees.nodes import TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import check_matches
from tests.ragged import jagged, rows


def test_shared_spec_when_trees_are_equal_then_one_object() -> None:
    root = capture(TensorDict({"a": torch.zeros(1)})).spec.root
    assert share_spec(root) is share_spec(root._replace())


def test_conform_when_dense_rows_are_wanted_ragged_then_they_are() -> None:
    wanted = capture(TensorDict({"t": jagged([3, 1])}, [2])).spec
    found = conform(capture(TensorDict({"t": torch.zeros(2, 4, dtype=torch.int64)}, [2])), wanted)
    check_matches(wanted, found.spec, store="")
    assert [len(element) for element in found.values["t",]] == [4, 4]
    assert not found.tensors


def test_conform_when_ragged_rows_are_wanted_dense_then_they_are() -> None:
    wanted = capture(TensorDict({"t": torch.zeros(2, 3, dtype=torch.int64)}, [2])).spec
    found = conform(capture(TensorDict({"t": jagged([3, 3])}, [2])), wanted)
    assert found.spec.find(("t",)) == TensorLeaf("int64", (2, 3))
    assert found.tensors["t",].shape == (2, 3)


def test_conform_when_it_does_not_fit_then_it_stays_as_it_is() -> None:
    wanted = capture(TensorDict({"t": torch.zeros(2, 3, dtype=torch.int64)}, [2])).spec
    captured = capture(TensorDict({"t": jagged([3, 1])}, [2]))
    assert conform(captured, wanted) is captured


def test_conform_when_another_form_is_wanted_then_it_has_that() -> None:
    wanted = capture(TensorDict({"a": jagged([3, 1], (), torch.float32)}, [2])).spec
    found = conform(capture(lazy_stack(rows(3, 1)).select("a")), wanted).spec.find(("a",))
    assert found == wanted.find(("a",))


def test_conform_when_ragged_rows_have_the_form_already_then_nothing_is_made_anew() -> None:
    wanted = capture(TensorDict({"t": jagged([3, 1])}, [2])).spec
    captured = capture(TensorDict({"t": jagged([2, 2, 5])}, [3]))
    assert conform(captured, wanted) is captured


def test_capture_when_values_travel_then_they_are_encoded_already() -> None:
    values = capture(TensorDict({"s": NonTensorStack("a", "b")}, [2])).values["s",]
    assert isinstance(values, EncodedValues)
    assert (values, len(values.blobs)) == (["a", "b"], 2)


def test_capture_when_packed_is_wanted_then_elements() -> None:
    td = TensorDict({"h": TensorDict({"x": torch.zeros(2, 3)}, [2, 3])}, [2])
    wanted = capture(TensorDict({"h": lazy_stack([td[0]["h"], td[1]["h"][:1]])}, [2])).spec
    found = capture(td, like=wanted)
    check_matches(wanted, found.spec, store="")
    assert [element.entry.batch_size for element in found.values["h",]] == [torch.Size([3])] * 2
    assert found.spec.values == ((("h",), ValueLeaf((2,), True, wanted.values[0][1].ragged)),)
