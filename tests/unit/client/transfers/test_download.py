from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import RemoteProtocolError
from tdserve.client.content.leaves import Leaves
from tdserve.client.datasets.worker_pool import WorkerPool
from tdserve.client.transfers.download import receive_content
from tdserve.messages.content import read_layout
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import LeafBuffers
from tdserve.transport.stream import pack
from tests.unit.client.flat_content import status

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.tensor([True, False, True])}, [3])
LAYOUT = read_layout(capture(TD).spec)
COLUMNS = [TD["a"], TD["b"], status(version=9)]


def places() -> Leaves:
    """Returns leaves to receive into."""
    tensors = [torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)]
    return Leaves(tensors, [view_bytes(tensor).numpy() for tensor in tensors])


@pytest.mark.parametrize("into", [None, places()])
def test_receive_when_inline_then_the_columns(into: Leaves | None) -> None:
    inline = pack(LAYOUT.messages, LeafBuffers(COLUMNS))
    session: Any = None  # inline content needs none
    found = receive_content(LAYOUT, session, 0, pool=BufferPool(), timeout_s=1.0, inline=inline, into=into)
    assert torch.equal(found.get_leaves()[("a",)], TD["a"])
    assert torch.equal(found.get_leaves()[("b",)], TD["b"])
    assert found.version == 9
    assert into is None or torch.equal(into.tensors[0], TD["a"])


def test_receive_when_inline_of_another_length_then_error_and_nothing_written() -> None:
    into = places()
    session: Any = None
    with pytest.raises(RemoteProtocolError):
        receive_content(LAYOUT, session, 0, pool=BufferPool(), timeout_s=1.0, inline=b"short", into=into)
    assert not into.tensors[0].any()


def test_receive_when_the_pool_is_shared_then_small_content_lies_in_its_memory_too() -> None:
    pool = WorkerPool()
    session: Any = None
    inline = pack(LAYOUT.messages, LeafBuffers(COLUMNS))
    found = receive_content(LAYOUT, session, 0, pool=pool, timeout_s=1.0, inline=inline)
    assert all(torch.equal(got, sent) for got, sent in zip(found.columns, COLUMNS, strict=True))
    assert pool.send(found.columns[0].untyped_storage()) is not None
