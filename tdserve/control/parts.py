"""Messages that are too large for the server to receive as one, in parts that follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.message import Message

from tdserve.base.errors import RemoteProtocolError
from tdserve.messages.long_lists import find_lists
from tdserve.v1 import control_pb2

PART_BYTES = 1024 * 1024
"""Larger messages are cut into parts of this size."""

MAX_RECEIVED_BYTES = PART_BYTES + 256 * 1024
"""The server receives no larger message: the sender may be a stranger, parts may come slowly, and a message of many
small fields takes some fifty times its size while it is parsed."""

MIN_AHEAD_BYTES = PART_BYTES // 4
"""Shorter lists stay inside a message, even if the message is cut."""

MAX_JOINED_BYTES = 256 * 1024 * 1024
"""Specs of a hundred thousand leaves fit. Long lists go ahead of their message. Content above the inline limit never
travels in messages."""


def cut(message: Message) -> Iterator[control_pb2.MessagePart]:
    """Yields the parts of a message."""
    content = message.SerializeToString()
    for start in range(0, max(len(content), 1), PART_BYTES):
        is_last = start + PART_BYTES >= len(content)
        yield control_pb2.MessagePart(content=content[start : start + PART_BYTES], is_last=is_last)


def cut_large(messages: Iterable[control_pb2.ClientMessage]) -> Iterator[control_pb2.ClientMessage]:
    """Yields the messages of a session; replaces a large one by its parts, of which those of its long lists come
    first."""
    for message in messages:
        if message.ByteSize() <= PART_BYTES:
            yield message
            continue
        rest, taken = _take_lists_out(message)
        for data in taken:
            for part in _cut_list(data):
                yield control_pb2.ClientMessage(request=message.request, part=part)
        if taken and rest.ByteSize() <= PART_BYTES:
            yield rest
        else:
            for part in cut(rest):
                yield control_pb2.ClientMessage(request=message.request, part=part)


def _take_lists_out(message: control_pb2.ClientMessage) -> tuple[control_pb2.ClientMessage, list[bytes]]:
    """Returns a copy of a message without its long lists, and these lists; the message itself where it has no lists."""
    if not find_lists(message):
        return message, []
    copy = control_pb2.ClientMessage()
    copy.CopyFrom(message)
    taken = []
    for each in find_lists(copy):
        data = each.data
        if len(data) > MIN_AHEAD_BYTES:
            taken.append(data)
            each.ClearField("data")
            each.nbytes_ahead = len(data)
    return copy, taken


def _cut_list(data: bytes) -> Iterator[control_pb2.MessagePart]:
    for start in range(0, len(data), PART_BYTES):
        yield control_pb2.MessagePart(content=data[start : start + PART_BYTES], is_ahead=True)


class PartJoiner:
    """Joins the parts of messages, one message after the other.

    Attributes:
        nbytes: Size of the parts so far.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.nbytes = 0
        self._is_dropping = False

    @property
    def is_dropping(self) -> bool:
        """Whether the rest of a refused message is still to come."""
        return self._is_dropping

    def drop(self) -> None:
        """Drops the message that is arriving, and the rest of it when it comes."""
        self._parts, self.nbytes, self._is_dropping = [], 0, True

    def add(self, part: control_pb2.MessagePart) -> bytes | None:
        """Takes the next part; returns the whole message with the last part, otherwise None.

        Raises:
            RemoteProtocolError: They exceed what a message may have. The parts so far are dropped.
        """
        if self._is_dropping:
            self._is_dropping = not part.is_last
            return None
        self._parts.append(part.content)
        self.nbytes += len(self._parts[-1])
        is_too_long, nbytes = self.nbytes > MAX_JOINED_BYTES, self.nbytes
        if not (part.is_last or is_too_long):
            return None
        parts, self._parts, self.nbytes = self._parts, [], 0
        if is_too_long:
            raise RemoteProtocolError(expected=f"a message of at most {MAX_JOINED_BYTES} bytes", received=f"{nbytes}")
        return b"".join(parts)
