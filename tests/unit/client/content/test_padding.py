"""Ragged content is padded to the longest, as by tensordict's own pad_sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, pad_sequence

from tdserve.base.errors import InvalidRequestError
from tdserve.client.content.padding import pad_ragged
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tests.errors import raises
from tests.ragged import CASES, check_same, jagged, strided, turns


def filled(td: Any, pad: Any) -> Any:
    captured = capture(td)
    return build(*pad_ragged(captured.spec, captured.tensors, captured.values, pad))


@pytest.mark.parametrize("value", [0, 7, -1.5])
def test_pad_when_rows_differ_in_one_dimension_then_as_pad_sequence(value: float) -> None:
    rows = [TensorDict({"t": torch.rand(size), "n": TensorDict({"k": torch.rand(size, 2)})}) for size in (3, 0, 5)]
    check_same(pad_sequence(rows, return_mask=True, padding_value=value), filled(lazy_stack(rows), value))


def test_pad_when_tensor_is_jagged_then_filled_and_the_rest_as_it_was() -> None:
    td = TensorDict({"t": jagged([1, 2]), "r": torch.rand(2), "s": "text"}, [2])
    found = filled(td, {"t": -1})
    assert found["t"].tolist() == [[int(td["t"][0][0]), -1], td["t"][1].tolist()]
    assert found["masks", "t"].tolist() == [[True, False], [True, True]]
    assert torch.equal(found["r"], td["r"])
    assert found["s"] == "text"


def test_pad_when_two_dimensions_differ_then_the_mask_has_both() -> None:
    found = filled(TensorDict({"t": strided((2, 1), (1, 3))}, [2]), 0.5)
    assert found["t"].shape == (2, 2, 3)
    assert found["masks", "t"].int().tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]]
    assert bool((found["t"][~found["masks", "t"]] == 0.5).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint16])
def test_pad_when_dtype_is_special_then_it_stays(dtype: torch.dtype) -> None:
    found = filled(TensorDict({"t": jagged([1, 3], (2,), dtype)}, [2]), 0)
    assert (found["t"].dtype, found["t"].shape) == (dtype, (2, 3, 2))


@pytest.mark.parametrize("case", ["jagged, no rows", "jagged, all empty"])
def test_pad_when_there_is_nothing_then_no_size(case: str) -> None:
    found = filled(CASES[case], 0)
    assert found["t"].shape == (CASES[case].batch_size[0], 0, 4)


def test_pad_when_histories_differ_then_they_stay() -> None:
    td = TensorDict({"h": lazy_stack([turns(2), turns(3)]), "t": jagged([1, 2])}, [2])
    found = filled(td, 0)
    check_same(td["h"], found["h"])
    assert found["t"].shape == (2, 2)


def test_pad_when_not_asked_for_then_nothing_changes() -> None:
    captured = capture(CASES["jagged"])
    assert pad_ragged(captured.spec, captured.tensors, captured.values, None).spec is captured.spec
    plain = capture(TensorDict({"a": torch.zeros(2)}, [2]))
    assert pad_ragged(plain.spec, plain.tensors, plain.values, 0).spec is plain.spec


@pytest.mark.parametrize("pad", ["0", {"t": None}, {"r": 0}, {3: 0}])
def test_pad_when_it_is_no_number_then_invalid_request(pad: Any) -> None:
    with raises(InvalidRequestError, argument="pad"):
        filled(CASES["jagged"], pad)


@pytest.mark.parametrize("pad", [1 << 40, 1 << 70, 0.5, float("nan")])
def test_pad_when_number_does_not_fit_the_dtype_then_invalid_request_names_the_dtype(pad: float) -> None:
    with pytest.raises(InvalidRequestError, match="uint8"):
        filled(TensorDict({"t": jagged([1, 2], (), torch.uint8)}, [2]), pad)


def test_pad_when_there_are_masks_already_then_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="masks"):
        filled(TensorDict({"t": jagged([1, 2]), "masks": torch.zeros(2)}, [2]), 0)
