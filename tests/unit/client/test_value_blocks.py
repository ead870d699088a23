from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client import value_blocks
from tdserve.client.value_blocks import decode_values, encode_values
from tdserve.errors import CapacityError, NotSupportedError, RemoteProtocolError
from tdserve.spec.capture import capture
from tdserve.spec.tree import Node, Spec, ValueLeaf
from tdserve.v1 import control_pb2


def values_spec(batch_size: tuple[int, ...], *, per_row: bool) -> Spec:
    """One non-tensor leaf."""
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


def test_values_when_single_rows_got_their_own_then_the_spec_says_so() -> None:
    content = encode_values(values_spec((2,), per_row=True), {("v",): ["a", "b"]}, store="")
    found, values = decode_values(values_spec((2,), per_row=False), content)
    assert values == {("v",): ["a", "b"]}
    assert dict(found.values) == {("v",): ValueLeaf((2,), True)}


def test_values_when_a_column_is_missing_then_error() -> None:
    with pytest.raises(RemoteProtocolError, match="1 columns"):
        decode_values(values_spec((), per_row=False), control_pb2.ValueBlock().SerializeToString())


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
