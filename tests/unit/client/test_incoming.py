from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tdserve.client.datasets.worker_pool import WorkerPool
from tdserve.client.incoming import Received, receive, views
from tdserve.client.leaves import Leaves
from tdserve.content import ReadStatus, read_layout
from tdserve.errors import RemoteProtocolError, TransferAbortedError
from tdserve.layout import Layout
from tdserve.spec.capture import capture
from tdserve.spec.dtypes import ITEMSIZE
from tdserve.spec.torch_types import to_torch
from tdserve.spec.tree import Node, Spec, TensorLeaf
from tdserve.transport.ends import LeafEnd, as_bytes
from tdserve.transport.pool import BufferPool
from tdserve.transport.stream import pack
from tests.unit.client.content import status

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.tensor([True, False, True])}, [3])
LAYOUT = read_layout(capture(TD).spec)
COLUMNS = [TD["a"], TD["b"], status(version=9)]

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.builds(TensorLeaf, st.sampled_from(sorted(ITEMSIZE)), shapes)


@given(st.lists(st.tuples(leaves, st.integers(1, 4)), min_size=1, max_size=6), st.booleans())
def test_views_when_of_any_dtype_and_shape_then_over_the_buffer(
    found: list[tuple[TensorLeaf, int]], is_packed: bool
) -> None:
    repeated = [leaf for leaf, num_times in found for _ in range(num_times)]
    entries = tuple((f"k{number:02}", leaf) for number, leaf in enumerate(repeated))
    layout = Layout.of(Spec(Node((), None, None, None, entries)), is_packed=is_packed)
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


def test_receive_when_the_pool_is_shared_then_small_content_lies_in_its_memory_too() -> None:
    pool = WorkerPool()
    session: Any = None
    inline = pack(LAYOUT.messages, LeafEnd(COLUMNS))
    found = receive(LAYOUT, session, 0, pool=pool, timeout_s=1.0, inline=inline)
    assert all(torch.equal(got, sent) for got, sent in zip(found.columns, COLUMNS, strict=True))
    assert pool.send(found.columns[0].untyped_storage()) is not None
