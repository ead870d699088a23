from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

from tdserve.base.errors import NotSupportedError
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.captures.fake_tensors import (
    has_no_content,
    is_blank,
    to_meta,
    to_meta_capture,
    to_structure_capture,
)


def example() -> TensorDict:
    td = TensorDict({"x": torch.zeros(3, 4), "n": {"y": torch.zeros(3, dtype=torch.bool)}}, [3])
    td["note"] = NonTensorData("note", batch_size=[3])
    return td


def fake(td: Any) -> Any:
    mode = FakeTensorMode()
    return td.apply(mode.from_tensor)


def capture_structure(td: Any) -> Captured:
    return capture(td, takes_structure=True)


@pytest.mark.parametrize("make", [lambda td: td.to("meta"), fake])
def test_capture_when_tensors_have_no_content_then_takes_their_structure(make: Any) -> None:
    captured = capture_structure(make(example()))
    expected = capture(example())
    assert [leaf for _, leaf in captured.spec.tensors] == [leaf for _, leaf in expected.spec.tensors]
    assert all(tensor.is_meta for tensor in captured.tensors.values())
    assert captured.values == expected.values
    whole = to_meta_capture(captured, store="s")
    assert whole is not None
    assert whole.spec == expected.spec.with_device("meta")
    assert to_structure_capture(captured).spec.root.device in (None, "cpu")


@pytest.mark.parametrize(("make", "what"), [(lambda td: td.to("meta"), "a meta tensor"), (fake, "a fake tensor")])
def test_capture_when_content_is_needed_then_the_error_names_calls_that_take_structure(make: Any, what: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{what} at key 'x'.*memmap_like"):
        capture(make(example()))


def test_capture_when_large_structure_was_taken_then_is_not_recalled_as_content() -> None:
    td = TensorDict({f"x{number}": torch.zeros(2) for number in range(100)}).to("meta")
    capture_structure(td)
    with pytest.raises(NotSupportedError, match="a meta tensor"):
        capture(td)


def test_capture_when_stack_is_of_meta_rows_then_takes_its_structure() -> None:
    rows = [TensorDict({"x": torch.zeros(3, size, device="meta")}) for size in (1, 2)]
    assert capture_structure(LazyStackedTensorDict(rows[0], rows[0].clone())).tensors[("x",)].shape == (2, 3, 1)
    with pytest.raises(NotSupportedError, match="a meta tensor at key 'x'"):
        capture_structure(LazyStackedTensorDict(*rows))


@pytest.mark.slow
def test_capture_when_size_is_a_symbol_then_refuses() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensor = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(5, 7), static_shapes=False)
    assert to_meta(tensor) is None


def test_without_content_when_some_have_content_then_refuses_by_name() -> None:
    td = example().set("m", torch.zeros(3, device="meta"))
    with pytest.raises(NotSupportedError, match=r"key 'm'.*memmap_like"):
        to_meta_capture(capture_structure(td), store="s")
    assert to_meta_capture(capture_structure(example()), store="s") is None


def test_has_no_content_when_on_meta_then_true_and_else_false() -> None:
    assert has_no_content(torch.zeros(1, device="meta"))
    assert not has_no_content(torch.zeros(1))


def test_is_blank_when_versions_come_then_true_until_tensors_are_written() -> None:
    values = capture_structure(example().to("meta")).spec.with_device("meta")
    plain = values.select([("x",)])
    assert [is_blank(plain, version) for version in (0, 1)] == [True, False]
    assert [is_blank(values, version) for version in (0, 1, 2)] == [True, True, False]
    assert not is_blank(plain.with_device(None), 0)
