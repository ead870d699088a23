"""Values on their way: between what a tensordict holds and the ValueBlock of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from google.protobuf.message import DecodeError

from tdserve.data.values import ReadBlock
from tdserve.errors import CapacityError, RemoteProtocolError
from tdserve.spec.captured import EncodedValues
from tdserve.spec.deferred import MIN_ROWS, Deferred
from tdserve.spec.elements import flat_elements
from tdserve.spec.nodes import Form, Ragged
from tdserve.spec.packing import pack, unpack
from tdserve.spec.pieces import Pieces
from tdserve.spec.tree import Path, Spec, ValueLeaf
from tdserve.v1 import control_pb2
from tdserve.value_decoding import PICKLED
from tdserve.value_encoding import varint
from tdserve.values import decode_many, encode_many

_PICKLED = bytes([PICKLED])

_PER_ROW = b"\x10\x01"
"""ValueColumn.per_row = true, as it is serialised."""

MAX_VALUES_BYTES = 192 * 1024 * 1024
"""Values ride in one message, which must stay below gRPC's and the workers' limit of 256 MiB."""


def encode_values(spec: Spec, values: dict[Path, Any], *, store: str, allow_pickle: bool = False) -> bytes:
    """The serialised ValueBlock of a spec's value leaves; ``b""`` when there are none.

    Raises:
        CapacityError: They are too many for one message. Nothing was sent.
        NotSupportedError: One of them cannot travel; names its key.
    """
    if not spec.values:
        return b""
    parts: list[bytes] = []
    nbytes = 0
    for path, leaf in spec.values:
        blobs = _blobs(values[path], leaf, ".".join(path), allow_pickle)
        column = [part for blob in blobs for part in (_head(len(blob)), blob)]
        if leaf.per_row:
            column.append(_PER_ROW)
        column_nbytes = sum(map(len, column))
        parts += (_head(column_nbytes), *column)
        nbytes += column_nbytes
    if nbytes > MAX_VALUES_BYTES:
        raise CapacityError(what=f"the values of one write to {store!r}", asked=nbytes, free=MAX_VALUES_BYTES)
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _head(nbytes: int) -> bytes:
    """In front of so many bytes: of a column in a ValueBlock, and of a value in a ValueColumn, both field 1.

    The block is joined by hand: protobuf would copy half a megabyte of values twice, into memory that it touches for
    the first time (measured: 73 against 1,500 microseconds in a fresh process).
    """
    return b"\n" + varint(nbytes)


def row_nbytes(spec: Spec, values: Sequence[Any], *, allow_pickle: bool = False) -> int:
    """Encoded size of one row's values, in the order of ``spec.values``.

    Raises:
        NotSupportedError: One of them cannot travel; names its key.
    """
    if spec.has_ragged:
        columns = zip(spec.values, values, strict=True)
        blobs = [_blobs(value, leaf, ".".join(path), allow_pickle) for (path, leaf), value in columns]
        return sum(len(blob) for column in blobs for blob in column)
    return sum(map(len, encode_many(values, allow_pickle=allow_pickle)))


def _blobs(value: Any, leaf: ValueLeaf, key: str, allow_pickle: bool) -> list[bytes]:
    """One blob per element of the batch, in C order; a single one when all share it."""
    depth = len(leaf.batch_size) if leaf.per_row else 0
    ragged = leaf.ragged
    if ragged is None:
        if isinstance(value, EncodedValues) and depth == 1:
            return value.blobs
        elements = value if depth == 1 else flat_elements(value, depth)
        return encode_many(elements, key=key, allow_pickle=allow_pickle)
    if ragged.form is Form.PACKED:
        entries = [None if element is None else pack(element) for element in flat_elements(value, depth)]
        return encode_many(entries, key=key, allow_pickle=allow_pickle)
    return Pieces.of(value if depth == 1 else flat_elements(value, depth), ragged).blobs()


def decode_values(
    spec: Spec, content: bytes | control_pb2.ValueBlock | ReadBlock, *, allow_pickle: bool = False
) -> tuple[Spec, dict[Path, Any]]:
    """The values of a read, and the spec as they are: a leaf may have got values of single rows since it was stored.

    Raises:
        RemoteProtocolError: The block does not fit the spec.
        NotSupportedError: A value is pickled, and that is not allowed; names its key.
    """
    if not spec.values:
        return spec, {}
    block: Any = _block(content) if isinstance(content, bytes) else content
    if len(block.columns) != len(spec.values):
        raise RemoteProtocolError(expected=f"{len(spec.values)} columns of values", received=f"{len(block.columns)}")
    values: dict[Path, Any] = {}
    is_per_row: dict[Path, bool] = {}
    for (path, leaf), column in zip(spec.values, block.columns, strict=True):
        per_row = is_per_row[path] = column.per_row and bool(leaf.batch_size)
        blobs: Sequence[bytes] = column.values
        size = math.prod(leaf.batch_size) if per_row else 1
        if len(blobs) != size:
            raise RemoteProtocolError(expected=f"{size} values at {path}", received=f"{len(blobs)}")
        if leaf.ragged is not None:
            values[path] = _elements(blobs, leaf, leaf.ragged, per_row, ".".join(path), allow_pickle)
            continue
        decode = partial(decode_many, key=".".join(path), allow_pickle=allow_pickle)
        if per_row and _can_wait(blobs, leaf, allow_pickle):
            values[path] = Deferred(blobs, decode)
        else:
            decoded = decode(blobs)
            values[path] = _nest(decoded, leaf.batch_size) if per_row else decoded[0]
    return spec.with_per_row(is_per_row), values


def _elements(
    blobs: Sequence[bytes], leaf: ValueLeaf, ragged: Ragged, per_row: bool, key: str, allow_pickle: bool
) -> Any:
    """The elements of a ragged leaf or packed node, nested as its batch is."""
    if leaf.batch_size and not per_row:
        blobs = list(blobs) * math.prod(leaf.batch_size)
    elements: Any
    if ragged.form is Form.PACKED:
        decode = partial(_unpacked, key=key, allow_pickle=allow_pickle)
        if _can_wait(blobs, leaf, allow_pickle):
            return Deferred(blobs, decode)
        elements = decode(blobs)
    else:
        elements = Pieces.from_blobs(blobs, ragged)
    if not leaf.batch_size:
        return elements[0]
    return elements if len(leaf.batch_size) == 1 else _nest(list(elements), leaf.batch_size)


def _can_wait(blobs: Sequence[bytes], leaf: ValueLeaf, allow_pickle: bool) -> bool:
    """Whether the values may be decoded at the first look: not where that would be refused."""
    if len(leaf.batch_size) != 1 or len(blobs) < MIN_ROWS:
        return False
    return allow_pickle or not any(blob[:1] == _PICKLED for blob in blobs)


def _unpacked(blobs: Sequence[bytes], *, key: str, allow_pickle: bool) -> list[Any]:
    entries = decode_many(blobs, key=key, allow_pickle=allow_pickle)
    return [None if entry is None else unpack(entry) for entry in entries]


def _block(content: bytes) -> control_pb2.ValueBlock:
    try:
        return control_pb2.ValueBlock.FromString(content)
    except DecodeError:
        raise RemoteProtocolError(expected="values", received=f"{len(content)} bytes that are none") from None


def _nest(elements: list[Any], batch_size: tuple[int, ...]) -> list[Any]:
    for dim in range(len(batch_size) - 1, 0, -1):
        size = batch_size[dim]
        elements = [elements[row * size : (row + 1) * size] for row in range(math.prod(batch_size[:dim]))]
    return elements
