"""Single leaves; what a whole tensordict holds is tested in ``test_capture``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.errors import NotSupportedError
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.nodes import TensorLeaf, ValueLeaf


def test_tensor_when_it_is_a_view_of_bits_then_what_travels_is_resolved() -> None:
    found = capture(TensorDict({"a": torch.tensor([1 + 2j, 3 - 1j]).conj()}, [2]))
    assert found.spec.root.entries == (("a", TensorLeaf("complex64", (2,))),)
    assert not found.tensors["a",].is_conj()
    assert found.tensors["a",].tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(2, device="meta"), "a meta tensor"),
        (torch.zeros(2).to_sparse(), "a sparse_coo tensor"),
        (torch.zeros([2] + [1] * 64), "65 dimensions"),
    ],
)
def test_tensor_when_it_cannot_travel_then_refused_by_name(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"{what}.*key \('n', 'a'\) of store 'store'"):
        capture(TensorDict({"n": TensorDict({"a": tensor}, [2])}, [2]), store="store")


@pytest.mark.parametrize("tensor", [torch.zeros(1).expand(2), torch.zeros(2, dtype=torch.complex64).conj()])
def test_tensor_when_it_cannot_be_written_through_then_refused_as_destination(tensor: torch.Tensor) -> None:
    td = TensorDict({"a": tensor}, [2])
    capture(td)
    with pytest.raises(NotSupportedError, match="as destination"):
        capture(td, is_destination=True)


@pytest.mark.parametrize(
    ("item", "leaf", "value"),
    [
        (NonTensorData("a", batch_size=[2]), ValueLeaf((2,), False), "a"),
        (NonTensorStack(NonTensorData("a"), NonTensorData("b")), ValueLeaf((2,), True), ["a", "b"]),
    ],
)
def test_value_when_taken_apart_then_its_leaf_and_content(item: Any, leaf: ValueLeaf, value: Any) -> None:
    found = capture(TensorDict({"v": item}, [2]))
    assert found.spec.root.entries == (("v", leaf),)
    assert found.values["v",] == value
