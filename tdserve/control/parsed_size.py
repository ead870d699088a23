"""How much memory a serialised message may take once it is parsed, found without parsing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tdserve.v1 import control_pb2

PARSED_FACTOR = 54
"""Bytes of memory for each byte of a message of the smallest fields, each an empty message of its own (measured)."""

MAX_DEPTH = 4
"""Nesting down to which fields of bytes are found, which take no more than they have."""

MAX_FIELDS = 10_000
"""Fields that are looked at, which takes up to 40 ms; the rest counts as the smallest ones."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BULK = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def estimate_parsed_nbytes(content: bytes) -> int:
    """Returns an upper bound of the memory that a serialised ``ClientMessage`` takes, roughly."""
    return _Estimate(content).run()


class _Estimate:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._num_left = MAX_FIELDS

    def run(self) -> int:
        return self._weigh(control_pb2.ClientMessage.DESCRIPTOR, 0, len(self._content), MAX_DEPTH)

    def _weigh(self, kind: Any, start: int, end: int, depth: int) -> int:
        total, at = 0, start
        for number, begin, after in self._iter_fields(start, end):
            field: Any = kind.fields_by_number.get(number)
            is_message = field is not None and field.type == FieldDescriptor.TYPE_MESSAGE
            if begin is not None and is_message and depth:
                total += PARSED_FACTOR * (begin - at) + self._weigh(field.message_type, begin, after, depth - 1)
            elif begin is not None and field is not None and field.type in _BULK:
                total += PARSED_FACTOR * (begin - at) + (after - begin)
            else:
                total += PARSED_FACTOR * (after - at)
            at = after
        return total + PARSED_FACTOR * (end - at)

    def _iter_fields(self, start: int, end: int) -> Iterator[tuple[int, int | None, int]]:
        """Yields number, start of the content (None unless it has a length), and end of each field, as far as they are
        well-formed."""
        at = start
        while at < end and self._num_left:
            self._num_left -= 1
            tag, at = self._read_varint(at, end)
            begin: int | None = None
            if tag & 7 == _BYTES:
                nbytes, begin = self._read_varint(at, end)
                at = begin + nbytes
            elif tag & 7 == _VARINT:
                _, at = self._read_varint(at, end)
            elif tag & 7 in (_FIXED32, _FIXED64):
                at += 4 if tag & 7 == _FIXED32 else 8
            else:
                return
            if at > end:
                return
            yield tag >> 3, begin, at

    def _read_varint(self, at: int, end: int) -> tuple[int, int]:
        number = shift = 0
        while at < end and shift < 70:
            byte = self._content[at]
            number |= (byte & 0x7F) << shift
            at += 1
            if byte < 0x80:
                return number, at
            shift += 7
        return 0, end + 1
