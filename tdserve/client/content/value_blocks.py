"""Translates between the values of a tensordict and the ValueBlock of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tdserve.base.errors import RemoteProtocolError, TooLargeError
from tdserve.data.values import ReadBlock
from tdserve.messages.content import has_bundles
from tdserve.structure.building.deferred import MIN_ROWS, Deferred
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.captured import EncodedValues
from tdserve.structure.stacks.elements import flatten_elements, nest_list
from tdserve.structure.tensors.pieces import Pieces
from tdserve.structure.trees.nodes import Form, Ragged
from tdserve.structure.trees.tree import Path, Spec, ValueLeaf
from tdserve.values.value_bundles import SplitColumn, bundle
from tdserve.values.value_codec import PICKLED, decode_many, encode_many
from tdserve.values.value_columns import (
    Buffer,
    JoinedValues,
    decode_block,
    encode_column,
)

_PICKLED = bytes([PICKLED])

MAX_VALUES_BYTES = 192 * 1024 * 1024
"""All values are in one message, which must stay below the limit of gRPC and the workers, 256 MiB."""


def encode_values(spec: Spec, values: dict[Path, Any], *, store: str, allow_pickle: bool = False) -> bytes:
    """Encodes a single set of values, as ``encode_parts`` does, into one piece."""
    return b"".join(encode_parts(spec, [values], store=store, allow_pickle=allow_pickle))


def encode_parts(
    spec: Spec,
    several: Sequence[dict[Path, Any]],
    *,
    store: str,
    allow_pickle: bool = False,
    is_bundled: bool = False,
) -> list[Buffer]:
    """Encodes the value leaves of a spec as the parts of a serialised ValueBlock; ``[]`` if there are none.

    Parts of ragged leaves are the memory of their tensors, which must not change before the parts are used.

    Args:
        spec: Their structure, of any number of rows.
        several: Values of consecutive rows; a single set if not all leaves have a value per row.
        store: Name, for errors.
        allow_pickle: Whether values of any type are accepted.
        is_bundled: Whether all values of a row become one bundle, in the only column of the block (``may_bundle``).

    Raises:
        TooLargeError: They are too many for one message. Nothing was sent.
        NotSupportedError: One of them cannot be sent; the error names its key.
    """
    columns = []
    nbytes = 0
    for path, leaf in spec.values:
        key = ".".join(path)
        found = [_encode_column(values[path], leaf, key, allow_pickle) for values in several]
        column = SplitColumn.join(found)
        nbytes += column.nbytes
        if nbytes > MAX_VALUES_BYTES:
            raise TooLargeError(what=f"the values of one write to {store!r}", asked=nbytes, free=MAX_VALUES_BYTES)
        columns.append(column)
    if is_bundled:
        return encode_column(True, *bundle(columns))
    parts: list[Buffer] = []
    for (_, leaf), column in zip(spec.values, columns, strict=True):
        parts += encode_column(leaf.per_row, column.sizes, column.get_parts())
    return parts


def may_bundle(spec: Spec, stored: Spec) -> bool:
    """Returns whether new rows of a table have all of its values, each row its own, which may be sent as a bundle."""
    is_whole = len(spec.values) == len(stored.values) and all(leaf.per_row for _, leaf in spec.values)
    return is_whole and has_bundles(spec) and len(spec.batch_size) == 1


def compute_joinable_nbytes(spec: Spec, values: dict[Path, Any]) -> int | None:
    """Returns the size of values that may share a block with those of other rows, in bytes.

    Returns None if they may not: one value belongs to all rows, or the size is unknown.
    """
    nbytes = 0
    for path, leaf in spec.values:
        value = values[path]
        if not leaf.per_row or len(leaf.batch_size) != 1 or not isinstance(value, (EncodedValues, Pieces)):
            return None
        nbytes += value.nbytes
    return nbytes


def compute_row_nbytes(spec: Spec, values: Sequence[Any], *, allow_pickle: bool = False) -> int:
    """Returns the encoded size of one row's values, in the order of ``spec.values``.

    Raises:
        NotSupportedError: One of them cannot be sent; the error names its key.
    """
    if spec.has_ragged:
        leaves = zip(spec.values, values, strict=True)
        columns = [_encode_column(value, leaf, ".".join(path), allow_pickle) for (path, leaf), value in leaves]
        return sum(column.nbytes for column in columns)
    return sum(map(len, encode_many(values, allow_pickle=allow_pickle)))


def _encode_column(value: Any, leaf: ValueLeaf, key: str, allow_pickle: bool) -> SplitColumn:
    """Returns the elements of the batch in C order; a single one if all rows share it."""
    if isinstance(value, SplitColumn):
        return value
    depth = len(leaf.batch_size) if leaf.per_row else 0
    ragged = leaf.ragged
    if ragged is not None and ragged.form is not Form.PACKED:
        return Pieces.from_tensors(value if depth == 1 else flatten_elements(value, depth), ragged).split()
    if ragged is not None:
        entries = [None if element is None else pack(element) for element in flatten_elements(value, depth)]
        blobs = encode_many(entries, key=key, allow_pickle=allow_pickle)
    elif isinstance(value, EncodedValues) and depth == 1:
        blobs = value.blobs
    else:
        blobs = encode_many(value if depth == 1 else flatten_elements(value, depth), key=key, allow_pickle=allow_pickle)
    return SplitColumn.from_values(blobs)


def decode_values(
    spec: Spec, content: bytes | ReadBlock, *, allow_pickle: bool = False
) -> tuple[Spec, dict[Path, Any]]:
    """Decodes the values of a read.

    Also returns the spec that fits them: a leaf may have got values of single rows meanwhile.

    Raises:
        RemoteProtocolError: The block does not fit the spec.
        NotSupportedError: A value is pickled, which is not allowed; the error names its key.
    """
    if not spec.values:
        return spec, {}
    columns = decode_block(content) if isinstance(content, bytes) else content.columns
    if len(columns) != len(spec.values):
        raise RemoteProtocolError(expected=f"{len(spec.values)} columns of values", received=f"{len(columns)}")
    values: dict[Path, Any] = {}
    changed: dict[Path, bool] = {}
    for (path, leaf), (is_spread, blobs) in zip(spec.values, columns, strict=True):
        per_row = is_spread and bool(leaf.batch_size)
        if per_row != leaf.per_row:
            changed[path] = per_row
        size = math.prod(leaf.batch_size) if per_row else 1
        if len(blobs) != size:
            raise RemoteProtocolError(expected=f"{size} values at {path}", received=f"{len(blobs)}")
        if leaf.ragged is not None:
            values[path] = _decode_elements(blobs, leaf, leaf.ragged, per_row, ".".join(path), allow_pickle)
            continue
        decode = partial(decode_many, key=".".join(path), allow_pickle=allow_pickle)
        if per_row and _can_wait(blobs, leaf, allow_pickle):
            values[path] = Deferred(blobs, decode)
        else:
            decoded = decode(blobs)
            values[path] = nest_list(decoded, leaf.batch_size) if per_row else decoded[0]
    return spec.with_per_row(changed) if changed else spec, values


def _decode_elements(
    blobs: Sequence[bytes], leaf: ValueLeaf, ragged: Ragged, per_row: bool, key: str, allow_pickle: bool
) -> Any:
    """Returns the elements of a ragged leaf or packed node, nested like its batch."""
    if leaf.batch_size and not per_row:
        blobs = list(blobs) * math.prod(leaf.batch_size)
    elements: Any
    if ragged.form is Form.PACKED:
        decode = partial(_unpack, key=key, allow_pickle=allow_pickle)
        if _can_wait(blobs, leaf, allow_pickle):
            return Deferred(blobs, decode)
        elements = decode(blobs)
    else:
        elements = Pieces.from_blobs(blobs, ragged)
    if not leaf.batch_size:
        return elements[0]
    return elements if len(leaf.batch_size) == 1 else nest_list(list(elements), leaf.batch_size)


def _can_wait(blobs: Sequence[bytes], leaf: ValueLeaf, allow_pickle: bool) -> bool:
    """Returns whether the values may be decoded when first used: not if decoding would be refused."""
    if len(leaf.batch_size) != 1 or len(blobs) < MIN_ROWS:
        return False
    if allow_pickle:
        return True
    if isinstance(blobs, JoinedValues):
        return not (blobs.get_first_bytes() == PICKLED).any()
    return not any(blob[:1] == _PICKLED for blob in blobs)


def _unpack(blobs: Sequence[bytes], *, key: str, allow_pickle: bool) -> list[Any]:
    entries = decode_many(blobs, key=key, allow_pickle=allow_pickle)
    return [None if entry is None else unpack(entry) for entry in entries]
