from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.client.content.leaves import ReadEnd
from tdserve.messages.layout import LARGE_LEAF_BYTES, Layout
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.transport.sources_sinks import FlatBuffer


def layout() -> Layout:
    entries = [("a", TensorLeaf("uint8", (5,))), ("b", TensorLeaf("int32", (3, LARGE_LEAF_BYTES)))]
    return Layout.from_spec(Spec(Node((), None, None, None, (*entries, ("c", TensorLeaf("uint8", (7,)))))))


def test_read_end_when_leaves_are_read_then_sends_what_memory_would() -> None:
    asked: list[int] = []
    large = np.arange(3 * LARGE_LEAF_BYTES, dtype=np.int32).view(np.uint8)

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        asked.append(stop - start)
        return large[start:stop]

    small = {"a": np.arange(5, dtype=np.uint8), "c": np.arange(7, dtype=np.uint8)}
    plan = layout()
    source = ReadEnd([read if slot.path == ("b",) else small[slot.path[0]] for slot in plan.slots])
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8)
    sink = FlatBuffer(buffer)
    for message in plan.messages:
        content = source.find_memory(message)
        if content is None:
            content = torch.full((message.nbytes,), 0xAB, dtype=torch.uint8)
            source.fill(message, content)
            assert all(not content[start:stop].any() for start, stop in message.gaps)
        sink.drain(message, content)
    for slot in plan.slots:
        found = buffer[slot.offset : slot.offset + slot.nbytes].numpy()
        assert np.array_equal(found, large if slot.path == ("b",) else small[slot.path[0]])
    assert max(asked) <= 4 << 20


def test_read_end_when_one_leaf_lies_in_memory_then_is_sent_from_there() -> None:
    plan = Layout.from_spec(Spec(Node((), None, None, None, (("b", TensorLeaf("uint8", (LARGE_LEAF_BYTES,))),))))
    memory = np.zeros(LARGE_LEAF_BYTES, np.uint8)
    direct = ReadEnd([memory]).find_memory(plan.messages[0])
    assert direct is not None
    assert direct.data_ptr() == memory.ctypes.data
