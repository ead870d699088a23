from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict

from tdserve.base.errors import RemoteProtocolError, TransferAbortedError
from tdserve.client.content import received
from tdserve.client.content.received import Received, make_views
from tdserve.messages.content import ReadStatus, read_layout
from tdserve.messages.layout import Layout
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.transport.pool import BufferPool
from tests.unit.client.flat_content import status

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.tensor([True, False, True])}, [3])
LAYOUT = read_layout(capture(TD).spec)

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.builds(TensorLeaf, st.sampled_from(sorted(ITEMSIZE)), shapes)


@pytest.mark.slow
@given(st.lists(st.tuples(leaves, st.integers(1, 4)), min_size=1, max_size=6), st.booleans())
def test_views_when_of_any_dtype_and_shape_then_over_the_buffer(
    found: list[tuple[TensorLeaf, int]], is_packed: bool
) -> None:
    repeated = [leaf for leaf, num_times in found for _ in range(num_times)]
    entries = tuple((f"k{number:02}", leaf) for number, leaf in enumerate(repeated))
    layout = Layout.from_spec(Spec(Node((), None, None, None, entries)), is_packed=is_packed)
    buffer = BufferPool().take(layout.nbytes)
    for slot, view in zip(layout.slots, make_views(layout, buffer), strict=True):
        assert (view.dtype, tuple(view.shape)) == (to_torch(slot.dtype), slot.shape)
        assert view.is_contiguous()
        assert not slot.nbytes or view.data_ptr() == buffer.data_ptr() + slot.offset


def test_views_when_another_thread_makes_the_first_at_the_same_time_then_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = read_layout(capture(TensorDict({"first": torch.zeros(3), "second": torch.zeros(2)}, [])).spec)
    buffer, found = BufferPool().take(layout.nbytes), list[int]()

    class Interrupting(dict[str, int]):
        """Sizes of elements; a look-up, which happens while views are made, runs a callback."""

        def __getitem__(self, dtype: str) -> int:
            monkeypatch.undo()
            found.append(len(make_views(layout, buffer)))  # as another thread could do now
            return super().__getitem__(dtype)

    monkeypatch.setattr(received, "ITEMSIZE", Interrupting(ITEMSIZE))
    found.append(len(make_views(layout, buffer)))
    assert found == [len(layout.slots)] * 2


@pytest.mark.parametrize(
    ("kind", "error"),
    [(ReadStatus.TORN, TransferAbortedError), (ReadStatus.FAILED, RemoteProtocolError), (77, RemoteProtocolError)],
)
def test_version_when_the_read_is_not_whole_then_error(kind: int, error: type[Exception]) -> None:
    received = Received(LAYOUT, [TD["a"], TD["b"], status(kind)])
    with pytest.raises(error):
        _ = received.version
    assert received.is_void == (kind == ReadStatus.FAILED)


def test_num_missing_when_rows_were_overwritten_then_as_in_the_status() -> None:
    assert Received(LAYOUT, [TD["a"], TD["b"], status()]).num_torn == 0
    assert Received(LAYOUT, [TD["a"], TD["b"], status(num_torn=3)]).num_torn == 3
