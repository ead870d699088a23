"""Messages that are too large for the server to receive as one, in parts that follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.message import Message

from tdserve.base.errors import RemoteProtocolError
from tdserve.v1 import control_pb2

MAX_RECEIVED_BYTES = 4 * 1024 * 1024
"""The server receives no larger message: whoever sends one may be anybody, and its parts may come slowly."""

PART_BYTES = 1024 * 1024
"""Larger messages are cut."""

MAX_JOINED_BYTES = 256 * 1024 * 1024
"""Specs of a hundred thousand leaves and the columns of millions of rows fit; content never rides in messages beyond
the inline limit."""


def cut(message: Message) -> Iterator[control_pb2.MessagePart]:
    """Yields the parts of a message."""
    content = message.SerializeToString()
    for start in range(0, max(len(content), 1), PART_BYTES):
        is_last = start + PART_BYTES >= len(content)
        yield control_pb2.MessagePart(content=content[start : start + PART_BYTES], is_last=is_last)


def cut_large(messages: Iterable[control_pb2.ClientMessage]) -> Iterator[control_pb2.ClientMessage]:
    """Yields the messages of a session, in place of a large one its parts."""
    for message in messages:
        if message.ByteSize() <= PART_BYTES:
            yield message
        else:
            for part in cut(message):
                yield control_pb2.ClientMessage(request=message.request, part=part)


class PartJoiner:
    """Joins the parts of messages, one message after the other."""

    def __init__(self) -> None:
        self._content = bytearray()

    @property
    def nbytes(self) -> int:
        """Bytes of the parts so far."""
        return len(self._content)

    def add(self, part: control_pb2.MessagePart) -> bytes | None:
        """Takes the next part; returns the whole message with its last one, else None.

        Raises:
            RemoteProtocolError: They are more than a message may have. The parts so far are forgotten.
        """
        if self.nbytes + len(part.content) > MAX_JOINED_BYTES:
            nbytes = self.nbytes + len(part.content)
            self._content = bytearray()
            raise RemoteProtocolError(expected=f"a message of at most {MAX_JOINED_BYTES} bytes", received=f"{nbytes}")
        self._content += part.content
        if not part.is_last:
            return None
        whole, self._content = self._content, bytearray()
        return bytes(whole)
