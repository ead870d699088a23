from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import RemoteProtocolError
from tdserve.control import parts
from tdserve.control.parts import MAX_RECEIVED_BYTES, PART_BYTES, PartJoiner, cut, cut_large
from tdserve.messages.selection.selection import parse
from tdserve.v1 import control_pb2


def asking(nbytes: int) -> control_pb2.ClientMessage:
    """Returns a message of a little more than this size."""
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


@pytest.mark.parametrize("num_lists", [1, 2])
def test_cut_large_when_positions_are_many_then_they_go_ahead_and_the_message_stays_as_it_was(num_lists: int) -> None:
    lists = [np.arange(PART_BYTES // 8 + start) for start in range(num_lists)]
    message = control_pb2.ClientMessage(
        request=7, read=control_pb2.ReadRequest(selection=parse(tuple(lists)).to_message())
    )
    whole = message.SerializeToString()
    *ahead, small = cut_large([message])
    assert all(part.part.is_ahead and part.ByteSize() < MAX_RECEIVED_BYTES for part in ahead)
    assert b"".join(part.part.content for part in ahead) == b"".join(found.tobytes() for found in lists)
    assert small.ByteSize() < 100
    assert all(item.positions.nbytes_ahead and not item.positions.data for item in small.read.selection.items)
    assert message.SerializeToString() == whole  # a retry sends it again


def test_joiner_when_the_parts_are_too_many_then_refused_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_JOINED_BYTES", 10)
    joiner = PartJoiner()
    assert joiner.add(control_pb2.MessagePart(content=b"x" * 10)) is None
    assert joiner.nbytes == 10
    with pytest.raises(RemoteProtocolError, match="11"):
        joiner.add(control_pb2.MessagePart(content=b"x"))
    assert joiner.nbytes == 0
