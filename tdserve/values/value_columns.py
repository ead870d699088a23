"""Columns of serialised values, and the bytes of a block of them in a message. No value is decoded. No torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError, TransferAbortedError

Buffer = bytes | bytearray | memoryview

Sizes = NDArray[np.int64]

_HEAD = struct.Struct("<IIQ")
"""A column begins with whether it has a value per row, the number of its values, and the size of all of them."""

_SIZE = np.dtype("<u4")
"""Then come the length of each value, and the values."""

_FEW_BYTES = 1024
"""Values of about this size are copied faster than they are inspected."""


class JoinedValues(Sequence[bytes]):
    """Serialised values in one buffer, which may have more content. Immutable.

    Args:
        content: The buffer.
        sizes: Length of each value in it, at least 0.
        begins: Start of each, int64 ``[n]``; one number if they are contiguous from there.
        heads: The first bytes of every value, of one length, if they are apart from the rest.

    Attributes:
        content: As above.
        sizes: As above, int64 ``[n]``.
        heads: As above.
    """

    def __init__(self, content: Buffer, sizes: Sizes, *, begins: Sizes | int = 0, heads: bytes = b"") -> None:
        self.content = content
        self.sizes = sizes
        self.heads = heads
        self._begins = begins

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return list(self)[index] if self.heads else self._get_part(index)
        number = range(len(self))[index]
        return next(iter(self[number : number + 1]))

    def _get_part(self, index: slice) -> JoinedValues:
        begins = self._begins
        start, _, step = index.indices(len(self))
        if isinstance(begins, int) and step == 1:
            return JoinedValues(self.content, self.sizes[index], begins=begins + int(self.sizes[:start].sum()))
        return JoinedValues(self.content, self.sizes[index], begins=self.begins[index])

    def __iter__(self) -> Iterator[bytes]:
        if self.heads:
            width = len(self.heads) // len(self)
            pairs = enumerate(self.get_views())
            return iter([self.heads[width * number : width * (number + 1)] + bytes(view) for number, view in pairs])
        content = self.content if isinstance(self.content, bytes) else bytes(self.content)
        return iter([content[start:end] for start, end in self.iter_bounds()])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, JoinedValues)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as for a list

    @property
    def begins(self) -> Sizes:
        """Start of each value in the content, int64 ``[n]``."""
        begins = self._begins
        return begins + np.cumsum(self.sizes) - self.sizes if isinstance(begins, int) else begins

    def get_first_bytes(self) -> NDArray[np.uint8]:
        """Returns the first byte of each non-empty value; not supported for values with heads."""
        content: NDArray[np.uint8] = np.frombuffer(self.content, np.uint8)
        return np.asarray(content[self.begins[self.sizes > 0]])

    def get_views(self) -> list[Buffer]:
        """Returns the values without their heads; large ones are not copied."""
        content = self.content
        if int(self.sizes.sum()) > _FEW_BYTES * len(self):
            content = memoryview(content)
        return [content[start:end] for start, end in self.iter_bounds()]

    def get_parts(self) -> list[Buffer]:
        """Returns all values without their heads, concatenated, in as few parts as possible."""
        if not isinstance(self._begins, int):
            return self.get_views()
        return [memoryview(self.content)[self._begins : self._begins + int(self.sizes.sum())]]

    def iter_bounds(self) -> Iterator[tuple[int, int]]:
        """Yields the start and end of each value in the content."""
        begins = self.begins
        return zip(begins.tolist(), (begins + self.sizes).tolist(), strict=True)


class ValueColumn(NamedTuple):
    """One column of a ValueBlock.

    Attributes:
        per_row: Whether every element has a value; otherwise one value is common to all.
        values: Serialised values.
    """

    per_row: bool
    values: Sequence[bytes]

    def get_views(self, path: tuple[str, ...], num_rows: int) -> Sequence[Buffer]:
        """Returns the values of a path: one per row, or one for all rows; large ones are not copied.

        Raises:
            RemoteProtocolError: There is another number of them.
        """
        values = self.values.get_views() if isinstance(self.values, JoinedValues) else self.values
        if len(values) != (num_rows if self.per_row else 1):
            received = f"{len(values)} values of {path}"
            raise RemoteProtocolError(expected=f"{num_rows} values, or one for all", received=received)
        return values


def measure_sizes(values: Sequence[Buffer]) -> Sizes:
    """Returns the length of each value."""
    return np.fromiter(map(len, values), np.int64, len(values))


def split_rows(table: NDArray[Any]) -> list[bytes]:
    """Returns the bytes of each row of a contiguous table."""
    width = table.itemsize * table.shape[1]
    rows: list[bytes] = table.view(f"V{width}").reshape(-1).tolist() if width else [b""] * len(table)
    return rows


def join(values: Sequence[Buffer], *, head_nbytes: int = 0) -> JoinedValues:
    """Copies values together; the first ``head_nbytes`` of each are apart from the rest, if all are that long."""
    sizes = measure_sizes(values)
    if head_nbytes and len(values) and int(sizes.min()) >= head_nbytes:
        heads = b"".join([value[:head_nbytes] for value in values])
        content = bytearray().join([value[head_nbytes:] for value in values])
        return JoinedValues(content, sizes - head_nbytes, heads=heads)
    return JoinedValues(b"".join(values), sizes)


def encode_column(per_row: bool, sizes: Sizes, parts: Sequence[Buffer]) -> list[Buffer]:
    """Returns a serialised column, in parts.

    Args:
        per_row: As in ``ValueColumn``.
        sizes: Length of each value; below 4 GiB.
        parts: The values, concatenated, cut anywhere.
    """
    return [_HEAD.pack(per_row, len(sizes), int(sizes.sum())) + sizes.astype(_SIZE).tobytes(), *parts]


def encode_block(columns: Sequence[ValueColumn]) -> bytes:
    """Returns the serialised ValueBlock."""
    parts: list[Buffer] = []
    for per_row, values in columns:
        if isinstance(values, JoinedValues) and not values.heads:
            parts += encode_column(per_row, values.sizes, values.get_parts())
        else:
            each = list(values)
            parts += encode_column(per_row, measure_sizes(each), each)
    return b"".join(parts)


def join_blocks(blocks: Sequence[tuple[int, bytes]]) -> bytes:
    """Returns the serialised ValueBlock of consecutive elements.

    Args:
        blocks: The number of elements of each part, and its serialised ValueBlock.

    Raises:
        TransferAbortedError: A value that all elements share is another one in a later part.
    """
    counts = [count for count, _ in blocks]
    joined = []
    for parts in zip(*(decode_block(content) for _, content in blocks), strict=True):
        shared = {bytes(part.values[0]) for part in parts if not part.per_row}
        if len(shared) > 1:
            raise TransferAbortedError(transfer=0, reason="values were written while they were read")
        own = [len(part.values) // count for part, count in zip(parts, counts, strict=True) if part.per_row and count]
        if not own:
            joined.append(parts[0])
            continue
        values: list[bytes] = []
        for part, count in zip(parts, counts, strict=True):
            values += part.values if part.per_row else [part.values[0]] * (count * own[0])
        joined.append(ValueColumn(True, values))
    return encode_block(joined)


def decode_block(content: bytes) -> list[ValueColumn]:
    """Returns the columns of a serialised ValueBlock.

    Raises:
        RemoteProtocolError: The bytes are not a ValueBlock. No other error is raised.
    """
    columns = []
    at, end = 0, len(content)
    while at < end:
        try:
            per_row, num_values, nbytes = _HEAD.unpack_from(content, at)
            sizes = np.frombuffer(content, _SIZE, num_values, at + _HEAD.size).astype(np.int64)
        except (struct.error, ValueError):
            raise _make_block_error(content) from None
        begin = at + _HEAD.size + num_values * _SIZE.itemsize
        at = begin + nbytes
        if at > end or int(sizes.sum()) != nbytes or per_row > 1 or (num_values != 1 and not per_row):
            raise _make_block_error(content)
        columns.append(ValueColumn(bool(per_row), JoinedValues(content, sizes, begins=begin)))
    return columns


def _make_block_error(content: Buffer) -> RemoteProtocolError:
    return RemoteProtocolError(expected="values", received=f"{len(content)} bytes that are not value records")
