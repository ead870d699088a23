from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.client import outgoing
from tdserve.client.incoming import views
from tdserve.client.outgoing import Outgoing, encode_values
from tdserve.content import write_layout
from tdserve.errors import CapacityError, NotSupportedError
from tdserve.spec.capture import Captured, capture
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


def test_values_when_larger_than_a_message_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "MAX_VALUES_BYTES", 100)
    with pytest.raises(CapacityError, match="'x'"):
        made(TensorDict({"v": "y" * 101}, []), 1000)


def test_values_when_of_an_unknown_type_then_error_names_the_key() -> None:
    spec = capture(TensorDict({"n": {"v": "y"}}, [])).spec
    with pytest.raises(NotSupportedError, match=r"n\.v"):
        encode_values(spec, {("n", "v"): object()}, store="x")


def test_values_when_there_are_none_then_no_bytes() -> None:
    captured: Captured = capture(TD)
    assert encode_values(captured.spec, {}, store="x") == b""
