from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tdserve.base.errors import NotSupportedError
from tdserve.client.content.fake_modes import find_fake_mode
from tdserve.client.tensordicts.loading import imitate, is_imitation
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Path

JAGGED = TensorDict(
    {"j": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "x": torch.zeros(2)}, [2]
)
STACK = lazy_stack([TensorDict({"x": torch.zeros(size), "t": "v"}, []) for size in (1, 2)])
NESTED = TensorDict({"a": torch.zeros(2, 3, dtype=torch.int8), "n": {"t": "text", "x": torch.zeros(2)}}, [2])


def imitation(td: Any, device: Any = None, mode: Any = None, **options: Any) -> Any:
    """Returns what ``imitate`` makes from a tensordict's structure."""
    captured = capture(td)

    def fetch(paths: Sequence[Path]) -> dict[Path, Any]:
        assert find_fake_mode() is None
        return {path: captured.values[path] for path in paths}

    return imitate(captured.spec, fetch, device=device, mode=mode, **options)


def test_is_imitation_when_meta_or_under_a_mode_then_true() -> None:
    assert not is_imitation(None, find_fake_mode())
    assert not is_imitation("cpu", None)
    assert not is_imitation(0, None)
    assert is_imitation("meta", None)
    with FakeTensorMode() as mode:
        assert find_fake_mode() is mode
        assert is_imitation(None, find_fake_mode())


def test_imitate_when_meta_then_structure_and_values() -> None:
    td = imitation(NESTED, "meta")
    assert td["a"].is_meta
    assert (td["a"].shape, td["a"].dtype) == (torch.Size([2, 3]), torch.int8)
    assert td["n", "x"].is_meta
    assert td["n", "t"] == "text"
    assert td.device == td["n"].device == torch.device("meta")


def test_imitate_when_fake_then_fake_tensors_of_that_mode() -> None:
    mode = FakeTensorMode()
    td = imitation(NESTED, mode=mode)
    assert isinstance(td["a"], FakeTensor)
    assert td["a"].fake_mode is mode
    assert (td["a"].device, td["a"].shape, td["n", "t"]) == (torch.device("cpu"), torch.Size([2, 3]), "text")


def test_imitate_when_there_are_no_values_then_none_are_fetched() -> None:
    spec = capture(NESTED.select("a")).spec
    td = imitate(spec, lambda _: pytest.fail("fetched"), device="meta", mode=None)
    assert td["a"].is_meta


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", None])
def test_imitate_when_ragged_then_sizes_are_the_true_ones(device: Any) -> None:
    mode = None if device else FakeTensorMode(shape_env=ShapeEnv())
    found = imitation(STACK, device, mode)
    assert [row["x"].shape for row in found.unbind(0)] == [torch.Size([1]), torch.Size([2])]
    assert all(row["x"].is_meta if device else isinstance(row["x"], FakeTensor) for row in found.unbind(0))
    jagged = imitation(JAGGED, device, mode)
    assert jagged["j"].is_nested
    assert jagged["j"].is_meta == bool(device)
    padded = imitation(STACK, device, mode, pad=0)
    assert padded["x"].shape == torch.Size([2, 2])


def test_imitate_when_jagged_and_the_mode_has_no_symbols_then_the_error_names_the_remedy() -> None:
    with pytest.raises(NotSupportedError, match="ShapeEnv"):
        imitation(JAGGED, mode=FakeTensorMode())
