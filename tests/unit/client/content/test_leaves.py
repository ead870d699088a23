from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from tdserve.client.content.leaves import make_leaves
from tdserve.messages.content import read_layout, write_layout
from tdserve.structure.captures.capture import capture

PLAIN = TensorDict({"large": torch.arange(50_000.0).view(2, -1), "n": {"small": torch.arange(2)}}, [2])


def test_leaves_when_plain_then_in_the_layouts_order_with_the_bytes_of_their_memory() -> None:
    captured = capture(PLAIN)
    layout = write_layout(captured.spec)
    leaves = make_leaves(captured, layout)
    assert [leaf.data_ptr() for leaf in leaves.tensors] == [PLAIN[slot.path].data_ptr() for slot in layout.slots]
    assert leaves.contents is not None
    assert [(content.dtype, content.ctypes.data, content.nbytes) for content in leaves.contents] == [
        (np.dtype(np.uint8), leaf.data_ptr(), leaf.nbytes) for leaf in leaves.tensors
    ]


def test_leaves_when_some_are_not_contiguous_then_their_bytes_are_not_known() -> None:
    captured = capture(TensorDict({"a": torch.zeros(3, 2).T, "b": torch.zeros(2)}, [2]))
    leaves = make_leaves(captured, write_layout(captured.spec))
    assert leaves.contents is None
    assert sorted(tuple(leaf.shape) for leaf in leaves.tensors) == [(2,), (2, 3)]


def test_targets_when_written_to_then_the_leaves_hold_it_and_made_once() -> None:
    td = PLAIN.clone()
    captured = capture(td)
    leaves = make_leaves(captured, write_layout(captured.spec))
    assert leaves.targets is leaves.targets
    assert [target.nbytes for target in leaves.targets] == [leaf.nbytes for leaf in leaves.tensors]
    leaves.targets[[leaf.numel() for leaf in leaves.tensors].index(2)][:] = bytes([7, *[0] * 7, 9, *[0] * 7])
    assert td["n", "small"].tolist() == [7, 9]
    strided = capture(TensorDict({"a": torch.zeros(3, 2).T}, [2]))
    assert make_leaves(strided, write_layout(strided.spec)).targets == []


def test_leaves_when_asked_for_again_then_the_same_for_a_read_too() -> None:
    captured = capture(PLAIN)
    leaves = make_leaves(captured, write_layout(captured.spec))
    assert make_leaves(captured, write_layout(captured.spec)) is leaves
    assert make_leaves(captured, read_layout(captured.spec)) is leaves
    assert make_leaves(capture(PLAIN), write_layout(captured.spec)) is not leaves


def test_leaves_when_there_is_none_then_nothing() -> None:
    captured = capture(TensorDict({"v": "text"}, []))
    leaves = make_leaves(captured, write_layout(captured.spec))
    assert (leaves.tensors, leaves.contents) == ([], [])
