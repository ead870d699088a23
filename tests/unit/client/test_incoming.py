from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client.incoming import Received, decode_values, receive, views
from tdserve.client.leaves import Leaves
from tdserve.client.outgoing import encode_values
from tdserve.content import ReadStatus, read_layout
from tdserve.errors import RemoteProtocolError, TransferAbortedError
from tdserve.layout import Layout
from tdserve.spec.capture import capture
from tdserve.spec.dtypes import ITEMSIZE
from tdserve.spec.torch_types import to_torch
from tdserve.spec.tree import Node, Spec, TensorLeaf, ValueLeaf
from tdserve.transport.ends import LeafEnd, as_bytes
from tdserve.transport.pool import BufferPool
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2
from tests.unit.client.content import status

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.tensor([True, False, True])}, [3])
LAYOUT = read_layout(capture(TD).spec)
COLUMNS = [TD["a"], TD["b"], status(version=9)]

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.builds(TensorLeaf, st.sampled_from(sorted(ITEMSIZE)), shapes)


@given(st.lists(leaves, min_size=1, max_size=6))
def test_views_when_of_any_dtype_and_shape_then_over_the_buffer(found: list[TensorLeaf]) -> None:
    entries = tuple((f"k{number}", leaf) for number, leaf in enumerate(found))
    layout = Layout.of(Spec(Node((), None, None, None, entries)))
    buffer = BufferPool().take(layout.nbytes)
    for slot, view in zip(layout.slots, views(layout, buffer), strict=True):
        assert (view.dtype, tuple(view.shape)) == (to_torch(slot.dtype), slot.shape)
        assert view.is_contiguous()
        assert not slot.nbytes or view.data_ptr() == buffer.data_ptr() + slot.offset


def places() -> Leaves:
    """Leaves to receive into."""
    tensors = [torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)]
    return Leaves(tensors, [as_bytes(tensor).numpy() for tensor in tensors])


@pytest.mark.parametrize("into", [None, places()])
def test_receive_when_inline_then_the_columns(into: Leaves | None) -> None:
    inline = pack(LAYOUT.messages, LeafEnd(COLUMNS))
    session: Any = None  # inline content needs none
    found = receive(LAYOUT, session, 0, pool=BufferPool(), timeout_s=1.0, inline=inline, into=into)
    assert torch.equal(found.leaves()[("a",)], TD["a"])
    assert torch.equal(found.leaves()[("b",)], TD["b"])
    assert found.version == 9
    assert into is None or torch.equal(into.tensors[0], TD["a"])


def test_receive_when_inline_of_another_length_then_error_and_nothing_written() -> None:
    into = places()
    session: Any = None
    with pytest.raises(RemoteProtocolError):
        receive(LAYOUT, session, 0, pool=BufferPool(), timeout_s=1.0, inline=b"short", into=into)
    assert not into.tensors[0].any()


@pytest.mark.parametrize(
    ("kind", "error"),
    [(ReadStatus.TORN, TransferAbortedError), (ReadStatus.FAILED, RemoteProtocolError), (77, RemoteProtocolError)],
)
def test_version_when_the_read_is_not_whole_then_error(kind: int, error: type[Exception]) -> None:
    received = Received(LAYOUT, [TD["a"], TD["b"], status(kind)])
    with pytest.raises(error):
        _ = received.version
    assert received.is_void == (kind == ReadStatus.FAILED)


def test_num_missing_when_rows_were_overwritten_then_as_the_status_says() -> None:
    assert Received(LAYOUT, [TD["a"], TD["b"], status()]).num_missing == 0
    assert Received(LAYOUT, [TD["a"], TD["b"], status(num_missing=3)]).num_missing == 3


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
