"""Lists and tuples in dicts: columns if the structure has columns there, else values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import declare_ragged
from tdserve.structure.trees.nodes import TensorLeaf
from tdserve.structure.trees.tree import Spec

ROOT = capture(TensorDict({}, [])).spec.root

LISTS: dict[str, Any] = {
    "scalars": [np.float64(0.1), np.int64(2**53 + 1), 1],
    "arrays": [np.array([2**53 + 1]), np.array([2.5])],
    "nested": ([np.arange(2)], [np.arange(3)]),
    "dates": [np.datetime64("2020-01-01")],
    "tensors": [torch.ones(2), torch.ones(2)],
    "tensordicts": [TensorDict({"a": torch.ones(2)})],
    "numbers": [True, 2.5],
}


@pytest.mark.parametrize("listed", list(LISTS.values()), ids=list(LISTS))
def test_list_when_no_structure_is_known_then_the_value_that_it_is(listed: Any) -> None:
    found = read_dict({"t": torch.ones(1), "n": {"o": listed}})
    assert found.get(("n", "o")).data is listed
    rows = read_dict({"t": torch.ones(len(listed)), "o": [*listed]}, batch_size=[len(listed)])
    assert [row.data is each for row, each in zip(rows.get("o").tensordicts, listed, strict=True)] == [True] * len(
        listed
    )


def read_as(value: Any, dtype: str) -> Any:
    """The leaf that a value becomes in a column of a dtype."""
    leaf = TensorLeaf(dtype, tuple(len(each) for each in (value, value[0]) if isinstance(each, (list, tuple))))
    return read_dict({"a": value}, Spec(ROOT._replace(entries=(("a", leaf),))), store="frames")["a"]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([2**53 + 1, 2.5], "float64"),
        ([2**24 + 1, 0.5], "float32"),
        ([np.int64(2**53 + 1), 2.5], "float64"),
        ([torch.tensor(2**53 + 1), torch.tensor(2.5)], "float64"),
        ([2**53 + 1, 1j], "complex128"),
    ],
)
def test_list_when_fractions_beside_would_round_its_integers_then_refused_by_key(value: Any, dtype: str) -> None:
    with pytest.raises(SpecMismatchError, match=r"'frames', key 'a': expected .*(holds exactly|can hold)"):
        read_as(value, dtype)


def test_list_when_its_integers_fit_beside_fractions_then_a_column() -> None:
    assert read_as([2**53 + 2, 0.5], "float64").tolist() == [2**53 + 2, 0.5]
    assert read_as([torch.tensor(2**24), torch.tensor(0.1)], "float32").dtype is torch.float32


@pytest.mark.parametrize("listed", [[2**24 + 1, 0.5], [np.array([2**53 + 1]), np.array([2.5])]], ids=["plain", "typed"])
def test_list_when_it_declares_a_column_that_rounds_its_integers_then_refused_by_key(listed: Any) -> None:
    with pytest.raises(SpecMismatchError, match=r"'frames', key 'a': expected integers that float.* holds exactly"):
        read_dict({"a": listed}, store="frames", declares=True)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), torch.tensor([1j]).conj()],
    ids=["bfloat16", "with a gradient", "conjugate"],
)
def test_list_when_its_tensors_have_no_array_then_stacked_as_others_where_a_structure_is(tensor: torch.Tensor) -> None:
    expected = torch.stack([tensor, tensor]).detach()
    assert torch.equal(read_dict({"a": [tensor, tensor]}, declares=True)["a"], expected)
    found = read_as([tensor, tensor], str(tensor.dtype).removeprefix("torch."))
    assert torch.equal(found, expected)


def test_list_when_it_has_tensordicts_where_a_structure_has_tensors_then_refused_by_key() -> None:
    with pytest.raises(NotSupportedError, match=r"'a' of store 'frames'.*stack"):
        read_as([TensorDict({"x": torch.ones(1)})], "float32")


def test_list_when_a_ragged_row_has_lists_of_several_lengths_then_refused_by_key() -> None:
    one = capture({"tokens": np.zeros((3, 2))})
    rows = declare_ragged(one.spec, one.values, "tokens", store="").prepend((9,))
    with pytest.raises(SpecMismatchError, match="'tokens': expected float64 in lists of one length"):
        read_dict({"tokens": [[[1, 2], [3]]]}, rows)
