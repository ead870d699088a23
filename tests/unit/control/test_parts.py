from __future__ import annotations

import pytest

from tdserve.base.errors import RemoteProtocolError
from tdserve.control import parts
from tdserve.control.parts import MAX_RECEIVED_BYTES, PART_BYTES, PartJoiner, cut, cut_large
from tdserve.v1 import control_pb2


def asking(nbytes: int) -> control_pb2.ClientMessage:
    """A message of a little more than this size."""
    return control_pb2.ClientMessage(request=7, read=control_pb2.ReadRequest(fingerprint=b"x" * nbytes))


@pytest.mark.parametrize("nbytes", [0, PART_BYTES - 20, PART_BYTES, 3 * PART_BYTES + 5])
def test_cut_when_joined_then_the_same_message(nbytes: int) -> None:
    joiner, found = PartJoiner(), []
    for part in cut(asking(nbytes)):
        assert part.ByteSize() < MAX_RECEIVED_BYTES
        found.append(joiner.add(part))
    assert found[:-1] == [None] * (len(found) - 1)
    assert control_pb2.ClientMessage.FromString(found[-1] or b"") == asking(nbytes)
    assert joiner.nbytes == 0


def test_cut_large_when_messages_differ_in_size_then_only_large_ones_are_cut_and_in_order() -> None:
    found = list(cut_large([asking(1), asking(2 * PART_BYTES), asking(2)]))
    assert [message.WhichOneof("body") for message in found] == ["read", "part", "part", "part", "read"]
    assert {message.request for message in found} == {7}


def test_joiner_when_the_parts_are_too_many_then_refused_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_JOINED_BYTES", 10)
    joiner = PartJoiner()
    assert joiner.add(control_pb2.MessagePart(content=b"x" * 10)) is None
    assert joiner.nbytes == 10
    with pytest.raises(RemoteProtocolError, match="11"):
        joiner.add(control_pb2.MessagePart(content=b"x"))
    assert joiner.nbytes == 0
