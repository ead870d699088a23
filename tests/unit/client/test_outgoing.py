from __future__ import annotations

import torch
from tensordict import TensorDict

from tdserve.client.incoming import views
from tdserve.client.outgoing import Outgoing
from tdserve.content import write_layout
from tdserve.spec.capture import capture
from tdserve.transport.ends import FlatEnd
from tdserve.transport.stream import unpack

TD = TensorDict({"a": torch.arange(12.0).view(4, 3).T, "b": torch.ones(3, dtype=torch.complex64).conj()}, [3])


def made(td: TensorDict, inline_bytes: int) -> Outgoing:
    """Laid out for a session with this limit."""
    return Outgoing(capture(td), fingerprint=b"f", inline_bytes=inline_bytes, store="x")


def test_content_when_small_then_inline_and_whole() -> None:
    found = made(TD, 1000)
    layout = write_layout(capture(TD).spec)
    assert found.is_inline
    assert (found.message.fingerprint, list(found.message.message_nbytes)) == (b"f", [])
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(found.message.inline, layout.messages, FlatEnd(buffer))
    columns = {slot.path: column for slot, column in zip(layout.slots, views(layout, buffer), strict=True)}
    assert torch.equal(columns[("a",)], TD["a"])  # it was not contiguous
    assert torch.equal(columns[("b",)], TD["b"].resolve_conj())


def test_content_when_above_the_limit_then_its_sizes() -> None:
    found = made(TD, 10)
    assert not found.is_inline
    assert tuple(found.message.message_nbytes) == write_layout(capture(TD).spec).message_nbytes
    assert found.nbytes == sum(found.message.message_nbytes)


def test_content_when_there_is_none_then_inline_whatever_the_limit() -> None:
    assert made(TensorDict({"a": torch.zeros(0, 5)}, [0]), 0).is_inline
