"""Random inputs: mutations of valid bytes, and messages of any type with random fields. A seed decides all of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tdserve.messages.row_numbers import RUN_FORM

INTEGERS = (0, 1, 2, 3, 7, 8, 64, 255, 4096, 65_537, 2**24, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.01, 0.2, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "n",
    "..",
    "../x",
    "a/b",
    "x" * 300,
    "\x00",
    "\x1b[2J",
    "\u2028",
    "ü" * 90,
    "a#0",
    "{",
    "[]",
    "null",
    "{}",
)
SETTINGS = (
    '{"sampler": {"type": "Uniform"}}',
    '{"sampler": "telepathy", "limiter": 7}',
    '{"capacity": 1e999, "limiter": {"type": "MinSize", "min_size": -3}}',
    "[" * 2_000,
    '{"a": ' * 2_000,
    '{"sampler": {"type": "Prioritized", "alpha": "x", "beta": null}}',
)

MAX_DEPTH = 5
"""Nesting of a random message; a field of a type within itself is filled so deep."""

_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Inputs:
    """Makes random inputs.

    Args:
        seed: Decides all of them.
        names: Names that mean something to whoever gets the inputs: of stores, keys and the like.
        blobs: Bytes that do: fingerprints, content.
    """

    def __init__(self, seed: int, *, names: Sequence[str] = (), blobs: Sequence[bytes] = ()) -> None:
        self.rng = random.Random(seed)
        self._names = list(names)
        self._blobs = list(blobs)

    def mutate(self, content: bytes) -> bytes:
        """Returns content with a few random faults: bits, bytes, numbers, pieces that are cut, repeated or moved."""
        found = bytearray(content)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3, 8))):
            self._spoil(found)
        return bytes(found)

    def make_bytes(self, max_nbytes: int = 256) -> bytes:
        """Returns random bytes, often with the form of something."""
        kind = self.rng.randrange(6)
        if kind == 0 and self._blobs:
            return self.rng.choice(self._blobs)
        if kind == 1 and self._blobs:
            return self.mutate(self.rng.choice(self._blobs))
        if kind == 2:
            return RUN_FORM.pack(-1, self._number(-5, 2**40), self._number(-5, 2**62))
        if kind == 3:
            return struct.pack(
                "<4q", self.rng.choice((-1, -2, -3, -4, -5, 0)), *(self._number(-5, 2**62) for _ in "abc")
            )
        if kind == 4:
            return b""
        return self.rng.randbytes(self.rng.choice((1, 7, 8, 16, 32, max_nbytes)))

    def fill(self, message: Message, *, depth: int = 0, share: float = 0.6) -> Message:
        """Sets random fields of a message, and returns it."""
        taken: set[str] = set()
        fields: Any = message.DESCRIPTOR.fields
        for field in fields:
            union = field.containing_oneof
            if union is not None and len(union.fields) > 1:
                if union.name not in taken:
                    taken.add(union.name)
                    if self.rng.random() < 0.93:
                        self._set(message, self.rng.choice(union.fields), depth)
            elif self.rng.random() < share:
                self._set(message, field, depth)
        return message

    def change(self, message: Message) -> None:
        """Changes one or a few random fields of a message, somewhere in it."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            at, depth = message, 0
            while True:
                below = [value for field, value in at.ListFields() if _is_message(field)]
                inner = [each for value in below for each in (value if hasattr(value, "__len__") else (value,))]
                inner = [each for each in inner if isinstance(each, Message)]
                if not inner or self.rng.random() < 0.3:
                    break
                at, depth = self.rng.choice(inner), depth + 1
            fields: Any = at.DESCRIPTOR.fields
            if fields:
                field = self.rng.choice(fields)
                if self.rng.random() < 0.15:
                    at.ClearField(field.name)
                else:
                    self._set(at, field, depth)

    def make_text(self) -> str:
        """Returns a random text, often a name that means something."""
        if self._names and self.rng.random() < 0.75:
            return self.rng.choice(self._names)
        return self.rng.choice(TEXTS + SETTINGS)

    def _number(self, low: int, high: int) -> int:
        if self.rng.random() < 0.5:
            return max(low, min(high, self.rng.randrange(0, 12)))
        number = self.rng.choice(INTEGERS) + self.rng.choice((0, 0, 0, -1, 1))
        return max(low, min(high, -number if low < 0 and self.rng.random() < 0.25 else number))

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.is_repeated:
            if _is_map(field):
                return
            many = getattr(message, field.name)
            del many[:]
            for _ in range(self.rng.choice((1, 1, 2, 3, 5, 40 if depth < 2 else 3))):
                if _is_message(field):
                    if depth < MAX_DEPTH:
                        self.fill(many.add(), depth=depth + 1, share=0.4)
                else:
                    many.append(self._make_value(field))
        elif _is_message(field):
            inner = getattr(message, field.name)
            inner.SetInParent()
            if depth < MAX_DEPTH:
                self.fill(inner, depth=depth + 1, share=0.4)
        else:
            setattr(message, field.name, self._make_value(field))

    def _make_value(self, field: Any) -> Any:
        kind = field.cpp_type
        if kind in _LIMITS:
            return self._number(*_LIMITS[kind])
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return self.rng.choice((*field.enum_type.values_by_number, 77, -1, 2**31 - 1))
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.rng.choice(FLOATS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.make_bytes()
        return self.make_text()

    def _spoil(self, found: bytearray) -> None:
        rng = self.rng
        kind, size = rng.randrange(8), len(found)
        at = rng.randrange(size) if size else 0
        if kind == 0 and size:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            found[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 40)))
        elif kind == 3:
            del found[at : at + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            number = rng.choice(INTEGERS)
            form = rng.choice(("<I", ">I", "<Q"))
            found[at : at + struct.calcsize(form)] = struct.pack(form, number % 2 ** (8 * struct.calcsize(form)))
        elif kind == 6:
            piece = found[at : at + rng.choice((1, 8, 32))]
            found[at:at] = piece * rng.choice((1, 2, 20))
        else:
            found += rng.randbytes(rng.choice((1, 8, 64)))


def _is_message(field: Any) -> bool:
    return bool(field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE)


def _is_map(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)
