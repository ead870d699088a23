"""Records of entries."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from tdserve.base.errors import (
    InvalidRequestError,
    KeyNotFoundError,
    NotSupportedError,
    RemoteProtocolError,
    SpecMismatchError,
)
from tdserve.client.kv import tensor_records
from tdserve.client.kv.records import AnyRecords, LikeRecords, Records, make_records, wrap_tensor
from tdserve.structure.captures.capture import capture
from tdserve.values.value_bundles import SplitColumn
from tests.sameness import difference
from tests.tensordict_strategies import tensordicts


def make_like(like: Any, **how: Any) -> Records:
    """Returns the records of a store whose entries are like this."""
    is_tensor = isinstance(like, torch.Tensor)
    spec = capture(wrap_tensor(like) if is_tensor else like).spec
    return make_records("s", "tensor" if is_tensor else "tensordict", spec, allow_pickle=False, **how)


def cut(column: SplitColumn) -> list[bytes]:
    """Returns the single records of a column."""
    content = b"".join(column.get_parts())
    ends = np.cumsum(column.sizes).tolist()
    assert ends[-1:] in ([], [len(content)])
    return [content[begin:end] for begin, end in pairwise([0, *ends])]


ANY = AnyRecords("s", allow_pickle=False)


@pytest.mark.slow
@settings(max_examples=50)
@given(td=tensordicts())
def test_any_record_when_decoded_then_equal(td: TensorDict) -> None:
    assert difference(td, ANY.decode("k", ANY.encode("k", td), None)) is None


@pytest.mark.slow
@settings(max_examples=50)
@given(td=tensordicts())
def test_like_record_when_decoded_then_equal(td: TensorDict) -> None:
    records = make_like(td)
    assert difference(td, records.decode("k", records.encode("k", td), None)) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensor_when_decoded_then_equal_and_ones_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    for records in (ANY, make_like(tensor)):
        record = records.encode("k", tensor)
        found = records.decode("k", record, None)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(
            found.view(torch.uint8) if shape else found[None].view(torch.uint8),
            tensor.view(torch.uint8) if shape else tensor[None].view(torch.uint8),
        )
        found.zero_()
        assert records.encode("k", tensor) == record


def test_tensor_when_not_plain_then_its_content() -> None:
    for tensor in (torch.arange(12).view(3, 4).T, torch.nn.Parameter(torch.ones(2)), torch.tensor([1 + 1j]).conj()):
        assert torch.equal(ANY.decode("k", ANY.encode("k", tensor), None), tensor.detach())


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_like_records_when_many_then_as_one_by_one(num_rows: int) -> None:
    td = TensorDict({"a": torch.rand(num_rows, 3), "n": {"b": torch.arange(num_rows)}}, [num_rows])
    records = make_like(TensorDict({"a": torch.rand(3), "n": {"b": torch.tensor(1)}}, []))
    keys = [str(number) for number in range(num_rows)]
    found = cut(records.encode_many(keys, td))
    assert found == [records.encode("k", td[number]) for number in range(num_rows)]
    assert difference(td, records.decode_many(keys, found, None)) is None


COLUMNS = {
    "scalars": torch.arange(9),
    "flags": torch.arange(9) % 2 == 0,
    "half": torch.arange(18, dtype=torch.bfloat16).view(9, 2),
    "odd": torch.arange(27, dtype=torch.uint8).view(9, 3),
    "empty": torch.empty(9, 0, 2),
    "large": torch.arange(9 * 2048, dtype=torch.int32).view(9, 2, 1024),
    "large half": torch.arange(9 * 4096, dtype=torch.bfloat16).view(9, 4096),
    "of many elements": torch.arange(9 * 40_000).to(torch.uint8).view(9, 40_000),
    "transposed": torch.arange(9 * 2048).view(2, 1024, 9).permute(2, 1, 0),
    "every other": torch.arange(36).view(18, 2)[::2],
    "complex": torch.arange(9).to(torch.complex64).conj(),
    "negated": torch.complex(torch.zeros(9, 2), torch.ones(9, 2)).conj().imag,
    "with a gradient": torch.ones(9, 2048, requires_grad=True) * 2,
}


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("name", COLUMNS)
def test_tensors_when_many_of_one_form_then_as_one_by_one(name: str, copies: bool) -> None:
    column = COLUMNS[name]
    keys = [str(number) for number in range(9)]
    expected = [ANY.encode("k", row) for row in column]
    assert cut(ANY.encode_many(keys, column, copies=copies)) == expected
    assert cut(ANY.encode_many(keys, list(column), copies=copies)) == expected
    found = ANY.decode_many(keys, expected, None)
    assert torch.equal(torch.stack(found), column)


@pytest.mark.parametrize("copies", [True, False])
def test_tensors_when_several_forms_follow_one_another_then_as_one_by_one(copies: bool) -> None:
    values = [*COLUMNS["large"], *"abcdefghi", *COLUMNS["scalars"], *COLUMNS["half"], {"x": 1}, None, *COLUMNS["odd"]]
    keys = [str(number) for number in range(len(values))]
    assert cut(ANY.encode_many(keys, values, copies=copies)) == [ANY.encode("k", value) for value in values]


@pytest.mark.parametrize("name", ["scalars", "large"])
def test_tensors_when_changed_after_they_were_copied_then_the_records_stay(name: str) -> None:
    column = COLUMNS[name].clone()
    expected = [ANY.encode("k", row) for row in column]
    found = ANY.encode_many([str(number) for number in range(9)], list(column), copies=True)
    column.zero_()
    assert cut(found) == expected


def test_like_records_when_their_structure_has_values_then_equal() -> None:
    def make(number: int) -> TensorDict:
        return TensorDict({"text": "x" * number, "a": torch.tensor(number)}, [])

    records = make_like(make(1))
    found = cut(records.encode_many(["a", "b"], [make(2), make(3)]))
    assert difference(make(3), records.decode("b", found[1], None)) is None
    both = records.decode_many(["a", "b"], found, None)
    assert both["a"].tolist() == [2, 3]
    assert list(both["text"]) == ["xx", "xxx"]


MIXED: dict[str, Any] = {
    "text": "a",
    "tensor": torch.arange(3),
    "none": None,
    "dict": {"n": [1, (2, b"3")], "array": np.arange(2)},
    "tensordict": TensorDict({"x": torch.ones(2)}, []),
    "dict of tensors": {"x": torch.zeros(2)},
    "array": np.ones((2, 2)),
    "tuple": (1, [2.5, True]),
    "object": Path("x"),
}


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_any_records_when_many_of_several_kinds_then_as_one_by_one(allow_pickle: bool) -> None:
    records = AnyRecords("s", allow_pickle=allow_pickle)
    keys = [key for key in MIXED if allow_pickle or key != "object"]
    found = records.decode_many(keys, cut(records.encode_many(keys, [MIXED[key] for key in keys])), None)
    alone = [records.decode(key, records.encode(key, MIXED[key]), None) for key in keys]
    assert [(type(value), repr(value)) for value in found] == [(type(value), repr(value)) for value in alone]
    assert found[0] == "a"
    assert torch.equal(found[1], MIXED["tensor"])


@pytest.mark.parametrize("value", [16777217.0, 2**70, [1, 2.5], (0.1,), {"x": [1], "y": None}, {1: 2}], ids=str)
def test_any_record_when_a_dict_has_a_tensor_then_its_other_values_stay(value: Any) -> None:
    given = {"value": value, "tensor": torch.arange(3)}
    for record in (ANY.encode("k", given), *cut(ANY.encode_many(["k"], [given]))):
        found = ANY.decode("k", record, None).to_dict()
        assert torch.equal(found.pop("tensor"), given["tensor"])
        assert (found, type(found["value"])) == ({"value": value}, type(value))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2), TensorDict({"x": torch.zeros(2)}, [])], ids=["tensor", "tensordict"]
)
def test_any_record_when_a_tensor_is_in_a_list_then_the_error_has_its_path(tensor: Any) -> None:
    for value, path in (
        ({"a": {"b": [1, tensor]}}, r"\['a'\]\['b'\]\[1\]"),
        ({"t": torch.zeros(1), "a": ["x", {"b": (tensor, 1)}]}, r"\['a'\]\[1\]\['b'\]\[0\]"),
        ([tensor, 1], r"\[0\]"),
    ):
        with pytest.raises(NotSupportedError, match=rf"in a list, at {path} of entry 'k' of .*stack the tensors"):
            ANY.encode("k", value)


def test_any_records_when_one_of_many_is_refused_then_the_error_names_its_key() -> None:
    with pytest.raises(NotSupportedError, match="'c'"):
        ANY.encode_many(["a", "b", "c"], ["x", {"y": 1}, [Path("x")]])
    pickled = cut(AnyRecords("s", allow_pickle=True).encode_many(["a", "b"], ["x", [Path("x")]]))
    with pytest.raises(NotSupportedError, match="'b'"):
        ANY.decode_many(["a", "b"], pickled, None)


def test_select_when_given_then_only_that() -> None:
    td = TensorDict({"a": torch.tensor(1), "n": {"b": torch.tensor(2), "c": torch.tensor(3)}}, [])
    for records in (ANY, make_like(td)):
        record = records.encode("k", td)
        assert difference(td.select(("n", "b")), records.decode("k", record, [("n", "b")])) is None
        with pytest.raises(KeyNotFoundError):
            records.decode("k", record, [("x",)])
    with pytest.raises(InvalidRequestError):
        ANY.decode("k", ANY.encode("k", 5), [("x",)])


@pytest.mark.parametrize("wrong", [5, torch.zeros(3), TensorDict({"b": torch.zeros(2)}, [])])
def test_like_record_when_something_else_then_refused(wrong: Any) -> None:
    with pytest.raises(SpecMismatchError):
        make_like(TensorDict({"a": torch.zeros(2)}, [])).encode("k", wrong)
    if not isinstance(wrong, torch.Tensor):
        with pytest.raises(SpecMismatchError):
            make_like(torch.zeros(2)).encode("k", wrong)


@pytest.mark.parametrize("values", [[1], 5, torch.tensor(1.0), torch.zeros(3)])
def test_encode_many_when_not_one_per_key_then_refused(values: Any) -> None:
    with pytest.raises(InvalidRequestError):
        ANY.encode_many(["a", "b"], values)


def test_value_when_it_needs_pickle_then_only_as_allowed() -> None:
    value = range(2)
    with pytest.raises(NotSupportedError):
        ANY.encode("k", value)
    trusting = AnyRecords("s", allow_pickle=True)
    record = trusting.encode("k", value)
    assert trusting.decode("k", record, None) == value
    with pytest.raises(NotSupportedError):
        ANY.decode("k", record, None)


@pytest.mark.parametrize("extra", [1, "text", [1, "b"], (np.arange(2),), {"x": torch.zeros(2)}], ids=repr)
def test_dict_when_it_needs_no_pickle_then_the_same_record_with_and_without_leave(extra: Any) -> None:
    value = {"w": torch.ones(2), "extra": extra}
    assert AnyRecords("s", allow_pickle=True).encode("k", value) == ANY.encode("k", value)


def test_dict_when_it_needs_pickle_then_a_dict_again() -> None:
    trusting = AnyRecords("s", allow_pickle=True)
    for extra in (range(1), [torch.ones(2)], {0: torch.ones(2)}):
        value = {"w": torch.ones(2), "extra": extra}
        with pytest.raises(NotSupportedError, match=r"of (store )?'s'"):
            ANY.encode("k", value)
        found = trusting.decode("k", trusting.encode("k", value), None)
        assert (type(found), type(found["extra"])) == (dict, type(extra))


LISTED = {
    "equal": [torch.ones(2), torch.ones(2)],
    "unequal": (torch.ones(2), torch.ones(3)),
    "nested": [[torch.ones(2)]],
    "dtypes": [torch.tensor([2**53 + 1]), torch.tensor([2.5])],
    "bfloat16": [torch.ones(2, dtype=torch.bfloat16)],
    "with a gradient": [torch.ones(2, requires_grad=True)],
    "tensordicts": [TensorDict(a=torch.ones(2))],
    "in dicts": [{"a": torch.ones(2)}],
}


@pytest.mark.parametrize("beside", [{}, {"t": torch.ones(1)}], ids=["alone", "beside a tensor"])
@pytest.mark.parametrize("listed", list(LISTED.values()), ids=list(LISTED))
def test_tensors_when_in_a_list_then_refused_by_place_with_a_remedy(listed: Any, beside: dict[str, Any]) -> None:
    for value, place in (({**beside, "o": listed}, r"\['o'\]"), ({**beside, "d": {"o": listed}}, r"\['d'\]\['o'\]")):
        with pytest.raises(NotSupportedError, match=rf"list, at {place}\[0\].* of entry 'k' of 's'.*stack the tensors"):
            ANY.encode("k", value)


@pytest.mark.parametrize("record", [b"", b"\x07", b"\x02", b"\x02\x01\x02\0\0\0\0\0", b"\x01\x90", b"\x00"])
def test_decode_when_it_is_no_record_then_refused(record: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        ANY.decode("k", record, None)
    with pytest.raises(RemoteProtocolError):
        make_like(torch.zeros(3)).decode("k", record, None)


def test_array_when_a_value_then_an_array_again() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    found = ANY.decode("k", ANY.encode("k", array), None)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    assert isinstance(make_like(TensorDict({"a": torch.zeros(2)}, [])), LikeRecords)


def make_cycle(kind: type) -> Any:
    """Returns a list or dict that contains itself."""
    made: Any = kind()
    if kind is dict:
        made["self"] = made
    else:
        made.append(made)
    return made


@pytest.mark.parametrize("kind", [list, dict])
def test_any_record_when_a_value_contains_itself_then_error_has_store_and_key(kind: type) -> None:
    for encode in (lambda value: ANY.encode("k", value), lambda value: ANY.encode_many(["k"], [value])):
        with pytest.raises(NotSupportedError, match=r"'k' of 's'.*contains itself"):
            encode(make_cycle(kind))


@pytest.mark.parametrize("kind", [list, dict])
def test_any_record_when_a_value_contains_itself_and_pickle_is_allowed_then_restored(kind: type) -> None:
    records = AnyRecords("s", allow_pickle=True)
    (record,) = cut(records.encode_many(["k"], [make_cycle(kind)]))
    found = records.decode("k", record, None)
    assert found["self" if kind is dict else 0] is found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.uint16])
def test_tensor_when_one_element_is_a_column_of_a_larger_one_then_the_record_of_its_copy(dtype: torch.dtype) -> None:
    column = torch.tensor([[1, 0]]).to(dtype)[:, 0]
    assert tensor_records.encode_tensor(column) == tensor_records.encode_tensor(column.clone())


def test_tensors_when_large_and_their_last_dimension_has_one_element_then_the_records_of_their_copies() -> None:
    columns = [torch.ones(4096, 1, dtype=torch.bfloat16).as_strided((4096, 1), (1, 7))] * 2
    found = tensor_records.encode_column(columns, copies=False)
    expected = tensor_records.encode_column([each.clone() for each in columns], copies=True)
    assert b"".join(found.pieces[0]) == b"".join(expected.pieces[0])
