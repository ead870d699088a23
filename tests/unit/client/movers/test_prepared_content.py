from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.content.received import make_views
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.session import Session
from tdserve.messages.content import write_layout
from tdserve.messages.layout import MAX_MESSAGE_BYTES
from tdserve.structure.captures.capture import capture
from tdserve.transport.sources_sinks import FlatBuffer
from tdserve.transport.stream import unpack
from tdserve.v1 import control_pb2

TD = TensorDict({"a": torch.arange(12.0).view(4, 3).T, "b": torch.ones(3, dtype=torch.complex64).conj()}, [3])
TARGET = WriteTarget("x", b"f")


def prepare(session: Session, td: TensorDict, inline_bytes: int) -> Outgoing:
    """Prepares content for a request that leaves so much room."""
    return session.movers.writes.prepare([capture(td)], TARGET, margin_nbytes=session.inline_bytes - inline_bytes)


def test_content_when_small_then_inline_and_whole(mailing: Session) -> None:
    found = prepare(mailing, TD, 1000)
    layout = write_layout(capture(TD).spec)
    assert found.is_inline
    assert found.on_permit is None
    assert (found.message.fingerprint, list(found.message.message_nbytes)) == (b"f", [])
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    unpack(found.message.inline, layout.messages, FlatBuffer(buffer))
    columns = {slot.path: column for slot, column in zip(layout.slots, make_views(layout, buffer), strict=True)}
    assert torch.equal(columns[("a",)], TD["a"])  # it was not contiguous
    assert torch.equal(columns[("b",)], TD["b"].resolve_conj())


def test_content_when_above_the_limit_then_its_sizes(mailing: Session) -> None:
    found = prepare(mailing, TD, 10)
    assert not found.is_inline
    assert tuple(found.message.message_nbytes) == write_layout(capture(TD).spec).message_nbytes
    assert found.nbytes == sum(found.message.message_nbytes)


def test_content_when_there_is_none_then_inline_whatever_the_limit(mailing: Session) -> None:
    assert prepare(mailing, TensorDict({"a": torch.zeros(0, 5)}, [0]), 0).is_inline


@pytest.fixture
def session(local_client: tdserve.Client) -> Session:
    """A session of a local client."""
    return local_client.session(Deadline.after(20.0))


def test_content_when_the_client_is_local_then_only_values_are_in_the_request(session: Session) -> None:
    td = TD.clone().set_non_tensor("t", "text")
    found = session.movers.writes.prepare([capture(td)], WriteTarget("x", b"f", capture(td).spec))
    assert found.is_inline
    assert (found.message.HasField("inline"), list(found.message.message_nbytes)) == (False, [])
    assert b"text" in found.message.values
    assert found.on_permit is not None


def test_content_when_of_a_version_of_a_local_client_then_its_values_are_written_with_it(session: Session) -> None:
    td = TensorDict({"w": torch.ones(3)}, []).set_non_tensor("t", "text")
    found = session.movers.writes.prepare([capture(td)], WriteTarget("x", b"f", is_packed=True))
    assert not found.message.values
    assert found.on_permit is not None
    found.on_permit(control_pb2.Accepted(path="stores/1.safetensors"))
    assert session.local is not None
    folder = session.local.root / "stores"
    assert b"text" in (folder / "1.values").read_bytes()
    for path in folder.glob("1.*"):
        path.unlink()


def test_content_when_values_are_many_then_behind_the_leaves_and_nothing_in_the_request(mailing: Session) -> None:
    td = TD.clone().set_non_tensor("t", "x" * (MAX_MESSAGE_BYTES + 10))
    found = prepare(mailing, td, 1000)
    leaves = write_layout(capture(TD).spec)
    assert not found.is_inline
    assert (found.message.values, found.message.HasField("inline")) == (b"", False)
    assert found.message.nbytes == sum(leaves.message_nbytes)
    assert found.message.values_nbytes > MAX_MESSAGE_BYTES
    sizes = [*leaves.message_nbytes, MAX_MESSAGE_BYTES, found.message.values_nbytes - MAX_MESSAGE_BYTES]
    assert list(found.message.message_nbytes) == sizes
    assert found.nbytes == sum(sizes)


def test_content_when_values_are_many_but_of_a_version_then_in_the_request(mailing: Session) -> None:
    td = TensorDict({"w": torch.ones(3)}, []).set_non_tensor("t", "x" * (1 << 17))
    found = mailing.movers.writes.prepare([capture(td)], WriteTarget("x", b"f", is_packed=True))
    assert len(found.message.values) > 1 << 17
    assert (found.is_inline, found.message.values_nbytes) == (True, 0)
