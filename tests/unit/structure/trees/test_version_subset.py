from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.version_subset import (
    FLOATING,
    convert_floats,
    decode_numbers,
    encode_numbers,
    select_leaves,
)

TD = TensorDict(
    {"a": torch.ones(2), "b": {"c": torch.arange(3), "d": torch.ones(1, dtype=torch.float64)}, "t": "text"}, []
)
SPEC = capture(TD).spec


def test_convert_floats_when_leaves_are_floating_point_then_only_these_have_the_dtype() -> None:
    found = convert_floats(SPEC, "bfloat16")
    expected = TensorDict(
        {"a": TD["a"].bfloat16(), "b": {"c": TD["b", "c"], "d": TD["b", "d"].bfloat16()}, "t": "x"}, []
    )
    assert found == capture(expected).spec
    assert convert_floats(SPEC, "bfloat16") is found


def test_convert_floats_when_nothing_would_change_then_the_same_object() -> None:
    integers = capture(TensorDict({"n": torch.arange(3)}, [])).spec
    assert convert_floats(SPEC, "") is SPEC
    assert all(convert_floats(integers, dtype) is integers for dtype in FLOATING)


@pytest.mark.parametrize("numbers", [[], [1], [0, 2]])
def test_only_leaves_when_chosen_then_these_tensors_and_all_values(numbers: list[int]) -> None:
    found = select_leaves(SPEC, numbers)
    assert found.tensors == tuple(SPEC.tensors[number] for number in numbers)
    assert found.values == SPEC.values
    assert decode_numbers(encode_numbers(numbers), SPEC) == numbers


@pytest.mark.parametrize("content", [encode_numbers([3]), encode_numbers([1, 0]), encode_numbers([1, 1]), b"abc"])
def test_numbers_when_they_are_none_of_this_structure_then_error(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="3 leaves"):
        decode_numbers(content, SPEC)
