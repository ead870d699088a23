from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.dtypes import ITEMSIZE, has_all_values
from tdserve.structure.trees.tree import check_matches
from tests.errors import raises

IGNORED = frozenset(("index", "note"))
LIKE = capture(TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, dtype=torch.int64)}}, [3])).spec


def td(**changes: Any) -> TensorDict:
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.tensor([1, 2, 3])}, **changes}, [3])


NOT_COMPARED = ("uint16", "uint32", "uint64", "complex32", "complex64", "complex128")
REAL = [name for name in ITEMSIZE if name not in NOT_COMPARED and not name.startswith("float8")]


def list_critical_values(name: str) -> torch.Tensor:
    """Returns the values of a dtype that a conversion is most likely to change."""
    dtype = to_torch(name)
    if name == "bool":
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.min + 1, 0, info.max - 1, info.max], dtype=dtype)
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    return torch.tensor([limits.min, smallest, limits.smallest_normal, 1 + limits.eps, limits.max], dtype=dtype)


@pytest.mark.parametrize("wider", REAL)
@pytest.mark.parametrize("name", REAL)
def test_holds_all_values_when_true_then_torch_changes_none(name: str, wider: str) -> None:
    values = list_critical_values(name)
    if has_all_values(wider, name):
        assert torch.equal(values.to(to_torch(wider)).to(values.dtype), values)
        assert torch.can_cast(values.dtype, to_torch(wider))


@pytest.mark.parametrize(
    ("name", "wider", "is_held"),
    [
        ("int32", "int64", True),
        ("int64", "int32", False),
        ("uint8", "int16", True),
        ("uint8", "int8", False),
        ("uint32", "int64", True),
        ("uint64", "int64", False),
        ("int8", "uint8", False),
        ("bool", "int64", True),
        ("bool", "float32", True),
        ("int64", "bool", False),
        ("int16", "float32", True),
        ("int32", "float32", False),
        ("int32", "float64", True),
        ("int64", "float64", False),
        ("float32", "float64", True),
        ("float64", "float32", False),
        ("float16", "float32", True),
        ("bfloat16", "float32", True),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float32", "int64", False),
        ("complex64", "complex128", True),
        ("complex128", "complex64", False),
        ("float32", "complex64", False),
        ("float8_e5m2", "float32", False),
    ],
)
def test_holds_all_values_when_asked_then_by_range_and_precision(name: str, wider: str, is_held: bool) -> None:
    assert has_all_values(wider, name) is is_held


def test_capture_when_dtypes_hold_all_values_then_converted() -> None:
    given = td(a=torch.tensor([0.5, 1, 2], dtype=torch.bfloat16), n={"b": torch.tensor([1, 2, 3], dtype=torch.uint8)})
    for _ in range(2):
        captured = capture(given, like=LIKE)
        check_matches(LIKE, captured.spec, store="")
        assert {path: (tensor.dtype, tensor.tolist()) for path, tensor in captured.tensors.items()} == {
            ("a",): (torch.float32, [0.5, 1, 2]),
            ("n", "b"): (torch.int64, [1, 2, 3]),
        }
    assert given["a"].dtype is torch.bfloat16
    other = capture(td(a=torch.zeros(3, dtype=torch.float64)).exclude("n")).spec  # the same content, for another one
    assert capture(given, like=other).tensors["a",].dtype is torch.float64


def test_capture_when_dtypes_are_those_wanted_then_the_tensors_themselves() -> None:
    given = td()
    captured = capture(given, like=LIKE)
    assert captured.tensors["a",].data_ptr() == given["a"].data_ptr()
    assert captured.spec is capture(td(), like=LIKE).spec


def test_capture_when_a_value_could_be_lost_then_the_error_has_the_remedy() -> None:
    captured = capture(td(a=torch.zeros(3, dtype=torch.float64)), like=LIKE)
    with pytest.raises(SpecMismatchError, match=r"float64\[3\], of which float32 .*\.to\(torch.float32\)"):
        check_matches(LIKE, captured.spec, store="x")


def test_capture_when_a_destination_has_other_dtypes_then_it_is_not_converted() -> None:
    given = td(a=torch.zeros(3, dtype=torch.float16))
    assert capture(given, like=LIKE, is_destination=True).tensors["a",].dtype is torch.float16


def test_capture_when_keys_are_to_be_ignored_then_left_out_where_the_structure_lacks_them() -> None:
    given = td(index=torch.arange(3))
    captured = capture(given, like=LIKE, ignores=IGNORED)
    check_matches(LIKE, captured.spec, store="")
    assert set(captured.tensors) == {("a",), ("n", "b")}
    own = capture(given).spec
    assert ("index",) in capture(given, like=own, ignores=IGNORED).tensors
    for other in (td(more=torch.zeros(3)), td(n={"b": torch.zeros(3, dtype=torch.int64), "index": torch.zeros(3)})):
        with pytest.raises(SpecMismatchError, match="no such key"):
            check_matches(LIKE, capture(other, like=LIKE, ignores=IGNORED).spec, store="")
    with raises(SpecMismatchError, key="index"):
        check_matches(LIKE, capture(given, like=LIKE).spec, store="")
