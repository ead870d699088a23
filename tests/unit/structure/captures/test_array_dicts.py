"""Dicts of arrays become tensordicts that share their memory where torch can, in the form of a structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.captures.array_dicts import read_dict, read_rows
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import declare_ragged
from tdserve.structure.tensors.array_tensors import read_array
from tdserve.structure.trees.nodes import TensorLeaf
from tdserve.structure.trees.tree import Spec

DTYPES = ["bool", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def spec_of(row: dict[str, Any]) -> Spec:
    """The structure of a row."""
    return capture(row, takes_structure=True).spec


ROW = spec_of({"x": np.zeros(2, np.float32), "n": {"y": np.int32(0), "b": False}, "text": "a"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_when_torch_has_its_dtype_then_shares_its_memory(dtype: str) -> None:
    array = np.zeros((3, 2), dtype)
    tensor = read_array(array)
    array[1, 0] = 1
    assert tensor[1, 0].item() == 1
    assert np.dtype(dtype) == tensor.numpy().dtype


def make_read_only() -> Any:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    return array


COPIED: dict[str, Callable[[], Any]] = {
    "read-only": make_read_only,
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (2, 3)),
    "negative strides": lambda: np.arange(6.0).reshape(2, 3)[::-1, ::-1],
    "other byte order": lambda: np.arange(6.0).reshape(2, 3).astype(">f8"),
    "field": lambda: np.array([(1, 2.0)], "i2,f8")["f1"],
    "empty, read-only": lambda: np.broadcast_to(np.zeros(3), (0, 3)),
    "scalar, read-only": lambda: np.broadcast_to(np.float64(3), ()),
    "subclass": lambda: np.eye(2).view(np.recarray)[::-1],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", list(COPIED.values()), ids=list(COPIED))
def test_array_when_torch_cannot_share_it_then_a_tensor_of_the_same_numbers(make: Callable[[], Any]) -> None:
    array = make()
    assert np.array_equal(read_array(array).numpy(), array)


def test_array_when_of_wide_strides_then_shares_its_memory() -> None:
    array = np.zeros((4, 6), np.float32)
    read_array(array[::2, 1:5].T)[0, 1] = 7
    assert array[2, 1] == 7


REFUSED: dict[str, tuple[Any, str]] = {
    "long double": (np.zeros(2, np.longdouble), r"astype\('float64'\)"),
    "its complex": (np.zeros(2, np.clongdouble), r"astype\('complex128'\)"),
    "datetime": (np.zeros(2, "M8[s]"), r"view\('int64'\)"),
    "timedelta": (np.zeros(2, "m8[s]"), r"view\('int64'\)"),
    "fields": (np.zeros(2, "i4,f4"), "under a key of its own"),
    "masked": (np.ma.masked_array([1.0, 2.0], [False, True]), "filled"),
}


@pytest.mark.parametrize(("array", "remedy"), list(REFUSED.values()), ids=list(REFUSED))
def test_array_when_no_tensor_can_show_it_then_refused_by_key_with_a_remedy(array: Any, remedy: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"'n', 'a'.*store 'frames'.*{remedy}"):
        read_dict({"n": {"a": array}}, store="frames")


SCALARS: dict[str, tuple[Any, str]] = {
    "date": (np.datetime64("2020-01-01"), r"view\('int64'\)"),
    "time": (np.timedelta64(1, "s"), r"view\('int64'\)"),
    "long double": (np.longdouble(1), r"astype\('float64'\)"),
    "fields": (np.zeros(2, "i4,f4")[0], "under a key of its own"),
}


@pytest.mark.parametrize("like", [None, ROW], ids=["no structure", "new key"])
@pytest.mark.parametrize(("value", "remedy"), list(SCALARS.values()), ids=list(SCALARS))
def test_scalar_when_its_arrays_are_refused_then_refused_like_them(value: Any, remedy: str, like: Spec | None) -> None:
    with pytest.raises(NotSupportedError, match=rf"'n', 'a'.*store 'frames'.*{remedy}"):
        read_dict({"n": {"a": value}}, like, store="frames")


@pytest.mark.parametrize("listed", [[np.datetime64("2020-01-01")], [np.longdouble(1)]], ids=["dates", "long doubles"])
def test_list_when_it_declares_what_no_tensor_shows_then_refused_with_a_remedy(listed: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"'n', 'a'.*store 'frames'.*(view|astype)\("):
        read_dict({"n": {"a": listed}}, store="frames", declares=True)


@pytest.mark.parametrize("given", [np.array(["2020-01-01"], "M8[D]"), np.datetime64("2020-01-01")], ids=["array", "1"])
def test_date_when_the_structure_has_values_there_then_refused_too(given: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"datetime64\[D\] at key 'a' of store 'frames'.*view\('int64'\)"):
        read_dict({"a": given}, spec_of({"a": None}), store="frames")


TEXTS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "objects": lambda texts: np.array(texts, object),
}


@pytest.mark.parametrize("make", list(TEXTS.values()), ids=list(TEXTS))
def test_strings_when_the_structure_has_values_there_then_one_per_row(make: Callable[[list[str]], Any]) -> None:
    rows = {"x": np.zeros((3, 2), np.float32), "n": {"y": np.arange(3)}}
    assert [row["text"] for row in read_dict({**rows, "text": make(["a", "b", "c"])}, ROW)] == ["a", "b", "c"]
    with pytest.raises(SpecMismatchError, match="'frames', key 'text': expected 3 values, one per row, got 2"):
        read_dict({**rows, "text": make(["a", "b"])}, ROW, store="frames")
    assert [row["text"] for row in read_dict({**rows, "text": "for all"}, ROW)] == ["for all"] * 3


@pytest.mark.parametrize("make", list(TEXTS.values()), ids=list(TEXTS))
def test_strings_when_rows_have_no_tensors_then_they_count_the_rows(make: Callable[[list[str]], Any]) -> None:
    row = spec_of({"who": "a", "n": {"text": "b"}})
    found = read_rows({"who": "user", "n": {"text": make(["hi", "you"])}}, row, store="")
    assert [(each["who"], each["n", "text"]) for each in found] == [("user", "hi"), ("user", "you")]
    with pytest.raises(SpecMismatchError, match=r"'n', 'text'.*expected 2 values, one per row, got 3"):
        read_rows({"who": ["a", "b"], "n": {"text": make(["c", "d", "e"])}}, row, store="")


def test_strings_when_in_several_dimensions_then_those_of_rows() -> None:
    texts = np.array([["a", "b", "c"]] * 2)
    assert read_rows({"text": texts}, spec_of({"text": ""}), store="").batch_size == (2, 3)
    rows = {"x": np.zeros((2, 3, 2), np.float32), "n": {"y": np.zeros((2, 3), int)}}
    assert read_dict({**rows, "text": texts}, ROW)[1, 2]["text"] == "c"
    with pytest.raises(SpecMismatchError, match=r"expected values of shape \[2, 3\], one per row, got shape \[3, 2\]"):
        read_dict({**rows, "text": texts.T}, ROW)


def test_strings_when_the_dict_is_one_row_then_its_value() -> None:
    tags = ["red", "green"]
    one = {"x": np.zeros(2, np.float32), "n": {"y": 1}, "text": tags}
    assert read_rows(one, ROW, store="")["text"] == tags
    listed = read_rows([{"text": tags}, {"text": ["blue"]}], spec_of({"text": tags}), store="")
    assert [row["text"] for row in listed] == [tags, ["blue"]]


def test_dict_when_no_structure_is_known_then_as_the_tensordict_of_its_content() -> None:
    x = np.ones((2, 3))
    found = read_dict({"x": x, "n": {"y": np.arange(2)}, "t": torch.zeros(2), "s": "one"}, batch_size=[2])
    assert found.batch_size == found["n"].batch_size == (2,)
    assert found["x"].data_ptr() == x.ctypes.data
    assert (found["n", "y"].tolist(), found["s"]) == ([0, 1], "one")
    assert read_dict({}).batch_size == ()


NUMBERS = {
    "f": 16777217.0,
    "i": 2**70,
    "b": True,
    "l": [0.1, 2**70],
    "t": (1, 2),
    "c": 1j,
    "empty": [],
    "d": {"x": 0.1, "y": [[1], [2]]},
    "by number": {1: 2.5, (2, 3): None},
}


@pytest.mark.parametrize("batch_size", [(), (2,)], ids=str)
def test_dict_when_it_has_numbers_without_a_structure_then_they_stay_what_they_are(batch_size: tuple[int, ...]) -> None:
    found = read_dict({**NUMBERS, "x": np.zeros(2)}, batch_size=batch_size)
    assert isinstance(found["x"], torch.Tensor)
    one = found[0] if batch_size else found
    expected = {**NUMBERS, "l": NUMBERS["l"][0], "d": {"x": 0.1, "y": [1]}} if batch_size else NUMBERS  # type: ignore[index]
    given = {key: value for key, value in one.to_dict().items() if key != "x"}
    assert given == expected
    assert [type(value) for value in given.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize("given", [2**70, -(2**70), 2**63, 2**64], ids=str)
def test_number_when_of_more_than_64_bits_then_no_leaf(given: Any) -> None:
    with pytest.raises(
        SpecMismatchError, match=r"'frames', key .*'n', 'a'.*: expected int64 numbers, integers of up to 64 bits"
    ):
        read_dict({"n": {"a": given}}, store="frames", declares=True)


def test_dict_when_it_declares_then_numbers_and_lists_are_of_torchs_dtypes_unless_they_have_some() -> None:
    given = {"f": 1.5, "i": 3, "b": True, "l": [1.0, 2.0], "g": np.float64(2), "h": [np.float16(1), np.float16(2)]}
    found = read_dict(given, declares=True)
    dtypes = [torch.float32, torch.int64, torch.bool, torch.float32, torch.float64, torch.float16]
    assert [found[key].dtype for key in given] == dtypes


@pytest.mark.parametrize("names", [np.array(["a", "bc"]), np.array(["a", "bc"], object), ["a", "bc"]], ids=str)
def test_dict_when_it_has_strings_for_all_rows_then_each_row_has_its_own(names: Any) -> None:
    found = read_dict({"x": np.zeros(2), "s": names}, batch_size=[2])
    assert isinstance(found.get("s"), NonTensorStack)
    assert found[1]["s"] == "bc"


def test_dict_when_the_structure_is_known_then_its_dimensions_tell_rows_from_one() -> None:
    one = {"x": np.ones(2, np.float32), "n": {"y": 3, "b": True}, "text": "hello"}
    assert read_dict(one, ROW).batch_size == ()
    rows = {
        "text": ["a", "b", "c"],
        "n": {"b": [True, False, True], "y": np.arange(3)},
        "x": np.ones((3, 2), np.float32),
    }
    found = read_dict(rows, ROW)
    assert found.batch_size == found["n"].batch_size == (3,)
    assert [row["text"] for row in found] == ["a", "b", "c"]
    assert read_dict({"x": np.ones((4, 3, 2))}, ROW).batch_size == (4, 3)
    assert read_dict({"text": ["a", "b"]}, ROW.prepend((9,))).batch_size == (2,)


def test_dict_when_nodes_have_dimensions_of_their_own_then_they_get_them() -> None:
    row = capture(TensorDict({"agents": TensorDict({"x": torch.zeros(3, 2)}, [3]), "r": torch.zeros(())}, [])).spec
    found = read_dict({"agents": {"x": np.zeros((5, 3, 2))}, "r": np.zeros(5)}, row)
    assert (found.batch_size, found["agents"].batch_size) == ((5,), (5, 3))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "uint8"),
        ([1, 2], "int16"),
        (2, "float16"),
        (1.5, "bfloat16"),
        (1.5, "complex64"),
        (True, "int8"),
        (2**25, "float32"),
        (0.5, "float16"),
        (2**60, "float64"),
        (float("inf"), "float32"),
        ([256, -1], "bfloat16"),
    ],
)
def test_number_when_the_structure_has_a_dtype_for_it_then_of_that(value: Any, dtype: str) -> None:
    leaf = TensorLeaf(dtype, tuple(np.shape(value)))
    found = read_dict({"a": value}, Spec(ROW.root._replace(entries=(("a", leaf),))))
    assert found["a"].dtype is getattr(torch, dtype)
    assert found["a"].tolist() == value


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (300, "uint8"),
        (-1, "uint8"),
        (1.5, "int64"),
        (1j, "float32"),
        (2, "bool"),
        ([1, 2.5], "int8"),
        (2**24 + 1, "float32"),
        ([0, 2**53 + 1], "float64"),
        (257, "bfloat16"),
        (2**70, "float32"),
        ([2**70], "int64"),
        (1e300, "float32"),
        ([1.0, -1e5], "float16"),
        (2**63 - 1, "complex128"),
        (70000, "float16"),
    ],
)
def test_number_when_the_dtype_would_change_it_then_refused(value: Any, dtype: str) -> None:
    leaf = TensorLeaf(dtype, tuple(np.shape(value)))
    with pytest.raises(SpecMismatchError, match=f"'a'.*{dtype}"):
        read_dict({"a": value}, Spec(ROW.root._replace(entries=(("a", leaf),))))


def test_dict_when_a_leaf_has_too_few_dimensions_then_refused_by_its_key() -> None:
    with pytest.raises(SpecMismatchError, match="'x': expected at least 1 dimensions"):
        read_dict({"x": np.float32(1)}, ROW)


def test_dict_when_a_key_is_no_text_then_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"\('n', 'x'\).*nest"):
        read_dict({("n", "x"): np.zeros(2)})  # type: ignore[dict-item]  # it is the mistake


def test_dict_when_it_has_tensordicts_then_they_stay() -> None:
    inner = TensorDict({"x": torch.zeros(2)}, [])
    assert read_dict({"n": inner})["n"] is inner


def test_dict_when_objects_have_arrays_inside_then_those() -> None:
    class Held:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(2)

    assert read_dict({"a": Held()})["a"].tolist() == [0, 1]


def test_dict_when_rows_differ_in_size_then_a_nested_tensor() -> None:
    one = capture({"tokens": np.zeros(3, np.int64)})
    row = declare_ragged(one.spec, one.values, "tokens", store="")
    found = read_dict({"tokens": [np.arange(2), [1, 2, 3], torch.arange(1)]}, row.prepend((9,)))
    assert [each.tolist() for each in found["tokens"].unbind()] == [[0, 1], [1, 2, 3], [0]]
    assert read_dict({"tokens": [4, 5]}, row)["tokens"].tolist() == [4, 5]
    assert read_dict({"tokens": np.zeros((2, 3), int)}, row).batch_size == (2,)


def test_dict_when_rows_differ_in_structure_then_a_list_of_dicts_is_a_lazy_stack() -> None:
    like = TensorDict({"chat": lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})])}, [2])
    found = read_dict({"chat": [{"a": np.zeros(4)}, {"a": np.zeros(1)}]}, capture(like).spec)
    assert [row["a"].shape for row in found["chat"].tensordicts] == [(4,), (1,)]


def test_rows_when_given_as_a_list_of_dicts_then_stacked() -> None:
    one = {"x": [1.0, 2.0], "n": {"y": 3, "b": True}, "text": "hello"}
    found = read_rows([one, {**one, "x": np.zeros(2, np.float32)}], ROW, store="")
    assert found.batch_size == (2,)
    assert found["x"].tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize(("is_first", "number"), [(True, 0), (False, 2)])
def test_rows_when_one_lacks_a_key_then_the_error_names_both(is_first: bool, number: int) -> None:
    one = {"x": np.zeros(2, np.float32), "n": {"y": 3, "b": True}, "text": "hello"}
    short = {**one, "n": {"y": 3}}
    rows = [short, one, one] if is_first else [one, one, short]
    with pytest.raises(SpecMismatchError, match=rf"'frames', key.*'n', 'b'.*no such key in row {number}"):
        read_rows(rows, ROW, store="frames")


def test_rows_when_one_of_a_list_is_several_then_refused() -> None:
    with pytest.raises(SpecMismatchError, match=r"batch size \[\] in each row, got \[4\] in row 1"):
        read_rows([{"x": np.zeros(2)}, {"x": np.zeros((4, 2))}], ROW, store="")


@pytest.mark.parametrize("rows", [[], [3], [TensorDict({})], "text"], ids=str)
def test_rows_when_they_are_no_dicts_then_returned_as_they_are(rows: Any) -> None:
    assert read_rows(rows, ROW, store="") is rows
