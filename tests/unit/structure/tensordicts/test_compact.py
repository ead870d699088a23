from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tdserve.structure.tensordicts.compact import put_together, take_apart

SIZE = 3


def over(buffer: torch.Tensor) -> TensorDict:
    """Returns leaves of several dtypes and strides, all in one buffer of 4,096 bytes."""
    numbers = buffer.view(torch.float32)
    nested = TensorDict({"c": buffer[2048:2051].view(torch.bool)}, [SIZE], device="cpu")
    source = {
        "a": numbers[:6].view(SIZE, 2),
        "b": numbers[32:64:2][:SIZE],
        "nested": nested,
        "empty": TensorDict({}, [SIZE]),
    }
    return TensorDict(source, [SIZE], names=["time"])


@pytest.fixture
def buffer() -> torch.Tensor:
    """Returns a buffer of bytes that are 0 or 1."""
    return torch.arange(4096, dtype=torch.uint8) % 2


def test_put_together_when_taken_apart_then_equal_over_the_same_memory(buffer: torch.Tensor) -> None:
    td = over(buffer)
    parts = take_apart(td)
    assert parts is not None
    storage, tree = parts
    found = put_together(storage, pickle.loads(pickle.dumps(tree)))
    assert (found == td).all()
    assert list(found.keys(True)) == list(td.keys(True))
    assert (found.names, found["nested"].device, found.device) == (["time"], torch.device("cpu"), None)
    assert found["empty"].batch_size == (SIZE,)
    buffer.fill_(1)
    assert found["nested", "c"].all()


def test_put_together_when_one_leaf_is_changed_in_place_then_backward_through_another_goes_on(
    buffer: torch.Tensor,
) -> None:
    parts = take_apart(over(buffer))
    assert parts is not None
    found = put_together(*parts)
    loss = torch.nn.Linear(2, 1)(found["a"]).sum()
    found["b"].add_(1)
    loss.backward()


OTHERS: dict[str, Callable[[TensorDict], TensorDict]] = {
    "of several storages": lambda td: td.set("d", torch.zeros(SIZE)),
    "locked": lambda td: td.lock_(),
    "with values": lambda td: td.set_non_tensor("d", "x"),
    "that requires grad": lambda td: td.set("a", td["a"].clone().requires_grad_()),
    "jagged": lambda td: td.set("d", torch.nested.nested_tensor([torch.zeros(1)] * SIZE, layout=torch.jagged)),
    "consolidated": lambda td: td.consolidate(),
    "without leaves": lambda td: td.select("empty"),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=list(OTHERS))
def test_taken_apart_when_not_as_plain_then_none(
    buffer: torch.Tensor, change: Callable[[TensorDict], TensorDict]
) -> None:
    assert take_apart(change(over(buffer))) is None
