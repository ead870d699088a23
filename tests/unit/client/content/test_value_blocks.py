from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import CapacityError, NotSupportedError, RemoteProtocolError
from tdserve.client.content import value_blocks
from tdserve.client.content.value_blocks import (
    compute_joinable_nbytes,
    compute_row_nbytes,
    decode_values,
    encode_parts,
    encode_values,
)
from tdserve.structure.building.build import build
from tdserve.structure.building.deferred import Deferred
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.trees.tree import Node, Spec, ValueLeaf
from tdserve.values.value_codec import decode_many
from tdserve.values.value_columns import decode_block
from tests.ragged import CASES, check_same, jagged, turns


def values_spec(batch_size: tuple[int, ...], *, per_row: bool) -> Spec:
    """Returns the structure of one non-tensor leaf."""
    return Spec(Node(batch_size, None, None, None, (("v", ValueLeaf(batch_size, per_row)),)))


@pytest.mark.parametrize(
    ("batch_size", "per_row", "value"),
    [
        ((), False, {"a": [1, None]}),
        ((3,), False, "all"),
        ((3,), True, ["x", 2, None]),
        ((2, 2), True, [["a", "b"], ["c", "d"]]),
        ((2, 0), True, [[], []]),
    ],
)
def test_values_when_encoded_and_decoded_then_equal(batch_size: tuple[int, ...], per_row: bool, value: Any) -> None:
    spec = values_spec(batch_size, per_row=per_row)
    content = encode_values(spec, {("v",): value}, store="")
    found, values = decode_values(spec, content)
    if 0 not in batch_size:
        assert values == {("v",): value}
    assert found.fingerprint == spec.fingerprint


def test_values_when_single_rows_got_their_own_then_the_spec_has_one_per_row() -> None:
    content = encode_values(values_spec((2,), per_row=True), {("v",): ["a", "b"]}, store="")
    found, values = decode_values(values_spec((2,), per_row=False), content)
    assert values == {("v",): ["a", "b"]}
    assert dict(found.values) == {("v",): ValueLeaf((2,), True)}


def test_values_when_a_column_is_missing_then_error() -> None:
    with pytest.raises(RemoteProtocolError, match="1 columns"):
        decode_values(values_spec((), per_row=False), b"")


def test_values_when_captured_from_a_stack_then_survive() -> None:
    stack = NonTensorStack(NonTensorData("x"), NonTensorData(3))
    captured = capture(TensorDict({"v": stack}, [2]))
    content = encode_values(captured.spec, captured.values, store="")
    assert decode_values(captured.spec, content)[1] == {("v",): ["x", 3]}


def test_values_when_larger_than_a_message_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_blocks, "MAX_VALUES_BYTES", 100)
    captured = capture(TensorDict({"v": "y" * 101}, []))
    with pytest.raises(CapacityError, match="'x'"):
        encode_values(captured.spec, captured.values, store="x")


def test_values_when_of_an_unknown_type_then_error_names_the_key() -> None:
    spec = capture(TensorDict({"n": {"v": "y"}}, [])).spec
    with pytest.raises(NotSupportedError, match=r"n\.v"):
        encode_values(spec, {("n", "v"): object()}, store="x")


def test_values_when_there_are_none_then_no_bytes() -> None:
    captured = capture(TensorDict({"a": torch.zeros(3)}, [3]))
    assert encode_values(captured.spec, {}, store="x") == b""


@pytest.mark.parametrize("case", CASES)
def test_values_when_rows_differ_then_they_come_back_equal(case: str) -> None:
    captured = capture(CASES[case])
    spec, values = decode_values(captured.spec, encode_values(captured.spec, captured.values, store=""))
    check_same(CASES[case], build(spec, captured.tensors, values))


def test_values_when_there_are_many_then_decoded_at_the_first_look() -> None:
    texts = [f"{number}" for number in range(64)]
    spec = values_spec((64,), per_row=True)
    found = decode_values(spec, encode_values(spec, {("v",): texts}, store=""))[1]["v",]
    assert isinstance(found, Deferred)
    td = build(spec, {}, {("v",): found})
    assert isinstance(td.get("v"), NonTensorStack)
    assert td["v"] == texts
    assert type(td.get("v")) is NonTensorStack


def test_values_when_many_histories_come_then_rows_at_the_first_look() -> None:
    td = TensorDict({"h": lazy_stack([turns(number % 3 + 1) for number in range(40)])}, [40])
    captured = capture(td)
    spec, values = decode_values(captured.spec, encode_values(captured.spec, captured.values, store=""))
    assert isinstance(values["h",], Deferred)
    check_same(td, build(spec, {}, values))


def test_values_when_many_are_pickled_and_that_is_not_allowed_then_refused_at_once() -> None:
    spec = values_spec((64,), per_row=True)
    content = encode_values(spec, {("v",): [range(1)] * 64}, store="", allow_pickle=True)
    with pytest.raises(NotSupportedError, match="'v'"):
        decode_values(spec, content)
    assert list(decode_values(spec, content, allow_pickle=True)[1]["v",]) == [range(1)] * 64


def test_values_when_a_column_has_too_few_then_error() -> None:
    content = encode_values(values_spec((2,), per_row=True), {("v",): ["a", "b"]}, store="")
    with pytest.raises(RemoteProtocolError, match="3 values"):
        decode_values(values_spec((3,), per_row=True), content)


def test_row_nbytes_when_a_row_is_ragged_then_as_much_as_is_sent() -> None:
    captured = capture(TensorDict({"t": jagged([3]), "s": "text"}, []))
    values = [captured.values[path] for path, _ in captured.spec.values]
    sent = encode_values(captured.spec, captured.values, store="")
    assert compute_row_nbytes(captured.spec, values) == sum(
        len(blob) for column in decode_block(sent) for blob in column.values
    )
    assert compute_row_nbytes(values_spec((), per_row=False), ["text"]) == 5


@pytest.mark.slow
@given(st.lists(st.binary(max_size=300), max_size=5), st.booleans())
def test_block_when_joined_by_hand_then_as_protobuf_would_have_it(contents: list[bytes], per_row: bool) -> None:
    batch_size = (len(contents),) if per_row else ()
    spec = Spec(
        Node(batch_size, None, None, None, (("v", ValueLeaf(batch_size, per_row)), ("w", ValueLeaf((), False))))
    )
    values: dict[tuple[str, ...], Any] = {("v",): contents if per_row else b"x", ("w",): "y" * 200}
    found = encode_values(spec, values, store="")
    assert [column.per_row for column in decode_block(found)] == [per_row, False]
    assert decode_many(decode_block(found)[0].values) == (contents if per_row else [b"x"])
    assert decode_many(decode_block(found)[1].values) == ["y" * 200]


def test_values_when_of_several_batches_then_as_those_of_one() -> None:
    def captured(*sizes: int) -> Captured:
        tokens = torch.nested.nested_tensor([torch.arange(size) for size in sizes], layout=torch.jagged)
        return capture(TensorDict({"t": tokens, "s": NonTensorStack(*map(str, sizes))}, [len(sizes)]))

    first, second, whole = captured(3, 1), captured(4), captured(3, 1, 4)
    found = b"".join(encode_parts(first.spec, [first.values, second.values], store=""))
    assert found == encode_values(whole.spec, whole.values, store="")
    assert decode_values(whole.spec, found)[1]["s",] == ["3", "1", "4"]


def test_joinable_when_all_leaves_have_encoded_values_per_row_then_their_bytes() -> None:
    captured = capture(TensorDict({"t": jagged([3, 1]), "s": NonTensorStack("a", "b")}, [2]))
    assert compute_joinable_nbytes(captured.spec, captured.values) == 8 * 4 + 2 * 2
    plain = capture(TensorDict({"a": torch.zeros(2)}, [2]))
    assert compute_joinable_nbytes(plain.spec, plain.values) == 0
    for td in (
        TensorDict({"s": "for all"}, [2]),
        TensorDict({"s": NonTensorStack(NonTensorStack("a"), NonTensorStack("b"))}, [2]),
        TensorDict({"s": NonTensorStack("a", "b")}, [2, 1][:1]),
    ):
        captured = capture(td, allow_pickle=True)
        assert compute_joinable_nbytes(captured.spec, captured.values) is None
