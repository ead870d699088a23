"""Non-tensor values on their way between messages and a store's objects; this process never looks inside one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tdserve.data.opened import OpenStore
from tdserve.errors import CorruptDataError, RemoteProtocolError
from tdserve.row_numbers import decode_rows, spread
from tdserve.spec.tree import Path
from tdserve.store.objects import ObjectColumn
from tdserve.store.spools import read_spooled
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

Elements = npt.NDArray[np.int64]


class ReadColumn(NamedTuple):
    """One column of a ValueBlock, as plain lists.

    Attributes:
        per_row: Whether every element has a value; otherwise a single one is that of all.
        values: Serialised values.
    """

    per_row: bool
    values: list[bytes]


class ReadBlock(NamedTuple):
    """The columns of a ValueBlock that was never a message.

    Attributes:
        columns: One per path.
    """

    columns: list[ReadColumn]


def read_columns(store: OpenStore, paths: Sequence[Path], elements: Elements | None) -> list[ReadColumn]:
    """The values of these elements of the store's flattened batch, as of one moment; ``None`` is all of it, in order.

    A leaf below a nested tensordict with more batch dimensions has several values for each of them.

    Raises:
        CorruptDataError: A value that the catalog promises is not there.
    """
    if not paths:
        return []
    objects = store.objects(writable=False)
    if objects is None:
        raise CorruptDataError(path=str(store.folder), expected=f"values of {paths[0]}", actual="none")
    wanted = [(path, _numbers(store, path, elements)) for path in paths]
    columns = []
    for (path, rows), (per_row, values) in zip(wanted, objects.get_many(wanted), strict=True):
        if None in values:
            if not len(rows):  # of no elements there is nothing, not even a value that all of them share
                columns.append(ReadColumn(True, []))
                continue
            where = f"row {rows[values.index(None)]}" if per_row else "every row"
            raise CorruptDataError(path=str(store.folder), expected=f"a value of {path} at {where}", actual="none")
        columns.append(ReadColumn(per_row, cast("list[bytes]", values)))
    return columns


def read_block(store: OpenStore, paths: Sequence[Path], elements: Elements | None) -> ReadBlock:
    """``read_columns`` as what a message would hold, for who reads them in this process."""
    return ReadBlock(read_columns(store, paths, elements))


def read_values(store: OpenStore, paths: Sequence[Path], elements: Elements | None) -> bytes:
    """``read_columns`` as a serialised ValueBlock; ``b""`` without paths."""
    block = control_pb2.ValueBlock()
    for per_row, values in read_columns(store, paths, elements):
        block.columns.add(per_row=per_row, values=values)
    return block.SerializeToString()


def put_values(store: OpenStore, order: worker_pb2.PutValues, *, before: bytes = b"") -> None:
    """Stores a ValueBlock; only the one writing worker is asked to.

    Args:
        before: Columns that come before those of the order.

    Raises:
        CapacityError: The environment is full; nothing was stored.
        RemoteProtocolError: The block does not fit the keys; nothing was stored.
    """
    objects = store.writable_objects()
    spooled = read_spooled(order.spool, order.spool_offset, order.spool_nbytes) if order.spool else b""
    block = _block(before + spooled + order.values)  # blocks one after the other are one block
    paths = [_path(key) for key in order.keys]
    if len(block.columns) != len(paths):
        raise RemoteProtocolError(expected=f"{len(paths)} columns of values", received=f"{len(block.columns)}")
    elements = decode_rows(order.elements) if not order.everything else None
    columns = []
    for path, column in zip(paths, block.columns, strict=True):
        rows = _numbers(store, path, elements)
        values = list(column.values)
        if len(values) != (len(rows) if column.per_row else 1):
            received = f"{len(values)} values of {path}"
            raise RemoteProtocolError(expected=f"{len(rows)} values, or one for all", received=received)
        if column.per_row:
            columns.append(ObjectColumn(path, rows, values))
        else:
            columns.append(ObjectColumn(path, None if elements is None else rows, values))
    objects.put_many(columns, clear=paths if elements is None else ())


def _numbers(store: OpenStore, path: Path, elements: Elements | None) -> Elements:
    """Positions in a leaf's own flattened batch that belong to elements of the store's."""
    batch_size = store.value_batch_sizes[path]
    if elements is None:
        return np.arange(math.prod(batch_size))
    return spread(elements, math.prod(batch_size[len(store.spec.batch_size) :]))


def _path(key: content_pb2.Path) -> Path:
    return tuple(key.parts)


def _block(content: bytes) -> control_pb2.ValueBlock:
    try:
        return control_pb2.ValueBlock.FromString(content)
    except DecodeError:
        raise RemoteProtocolError(expected="values", received=f"{len(content)} bytes that are none") from None
