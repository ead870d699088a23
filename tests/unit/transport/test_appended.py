"""Leaves and values in one transfer: every message comes from, and goes to, the end that it belongs to."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from tdserve.messages.content import cut_values
from tdserve.messages.layout import Layout
from tdserve.structure.captures.capture import capture
from tdserve.transport.appended import BytesEnd, SinkBehind, SourceBehind
from tdserve.transport.sources_sinks import FlatBuffer, LeafBuffers
from tdserve.transport.stream import pack, unpack

LEAF = torch.arange(10.0)
LAYOUT = Layout.from_spec(capture(TensorDict({"a": LEAF}, [10])).spec)
VALUES = bytes(range(200)) * 3
MESSAGES = (*LAYOUT.messages, *cut_values(len(VALUES)))


def test_ends_when_values_follow_the_leaves_then_both_arrive() -> None:
    content = pack(MESSAGES, SourceBehind(LeafBuffers([LEAF]), BytesEnd(VALUES)))
    assert content == LEAF.numpy().tobytes() + VALUES
    leaf, values = torch.zeros(10), torch.zeros(len(VALUES), dtype=torch.uint8)
    unpack(content, MESSAGES, SinkBehind(LeafBuffers([leaf]), FlatBuffer(values)))
    assert torch.equal(leaf, LEAF)
    assert values.numpy().tobytes() == VALUES


def test_direct_when_of_leaves_then_their_memory_and_of_bytes_then_none() -> None:
    source = SourceBehind(LeafBuffers([LEAF]), BytesEnd(VALUES))
    place = source.find_memory(MESSAGES[0])
    assert place is not None
    assert place.data_ptr() == LEAF.data_ptr()
    assert source.find_memory(MESSAGES[1]) is None
    values = torch.zeros(len(VALUES), dtype=torch.uint8)
    place = SinkBehind(LeafBuffers([LEAF]), FlatBuffer(values)).find_memory(MESSAGES[1])
    assert place is not None
    assert place.data_ptr() == values.data_ptr()
