"""Non-tensor values on their way between messages and a store's objects; this process never looks inside one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tdserve.data.opened import OpenStore
from tdserve.errors import CorruptDataError, RemoteProtocolError
from tdserve.row_numbers import decode_rows, spread
from tdserve.spec.tree import Path
from tdserve.store.objects import ALL_ROWS
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

Elements = npt.NDArray[np.int64]


def read_values(store: OpenStore, paths: Sequence[Path], elements: Elements | None) -> bytes:
    """The ValueBlock of these elements of the store's flattened batch; ``None`` is all of it, in order.

    A leaf below a nested tensordict with more batch dimensions has several values for each of them.

    Raises:
        CorruptDataError: A value that the catalog promises is not there.
    """
    if not paths:
        return b""
    objects = store.objects(writable=False)
    if objects is None:
        raise CorruptDataError(path=str(store.folder), expected=f"values of {paths[0]}", actual="none")
    block = control_pb2.ValueBlock()
    for path in paths:
        column = block.columns.add(per_row=objects.has_rows(path))
        rows = _numbers(store, path, elements) if column.per_row else [ALL_ROWS]
        (values,) = objects.get_many(rows, [path])
        for row, value in zip(rows, values, strict=True):
            if value is None:
                raise CorruptDataError(
                    path=str(store.folder), expected=f"a value of {path} at row {row}", actual="none"
                )
            column.values.append(value)
    return block.SerializeToString()


def put_values(store: OpenStore, order: worker_pb2.PutValues) -> None:
    """Stores a ValueBlock; only the one writing worker is asked to.

    Raises:
        CapacityError: The environment is full; nothing was stored.
        RemoteProtocolError: The block does not fit the keys; nothing was stored.
    """
    objects = store.writable_objects()
    block = _block(order.values)
    paths = [_path(key) for key in order.keys]
    if len(block.columns) != len(paths):
        raise RemoteProtocolError(expected=f"{len(paths)} columns of values", received=f"{len(block.columns)}")
    elements = decode_rows(order.elements) if not order.everything else None
    items: list[tuple[int, Path, bytes]] = []
    cleared: list[Path] = []
    for path, column in zip(paths, block.columns, strict=True):
        rows = _numbers(store, path, elements)
        if len(column.values) != (len(rows) if column.per_row else 1):
            received = f"{len(column.values)} values of {path}"
            raise RemoteProtocolError(expected=f"{len(rows)} values, or one for all", received=received)
        if elements is None:
            cleared.append(path)
        if elements is None and not column.per_row:
            items.append((ALL_ROWS, path, column.values[0]))
            continue
        if elements is not None and not objects.has_rows(path):
            ((held,),) = objects.get_many([ALL_ROWS], [path])
            if held is not None and all(value == held for value in column.values):
                continue  # as in tensordict: a row that gets the value of all rows has no value of its own
        values = column.values if column.per_row else [column.values[0]] * len(rows)
        items += [(row, path, value) for row, value in zip(rows, values, strict=True)]
    objects.put_many(items, clear=cleared)


def _numbers(store: OpenStore, path: Path, elements: Elements | None) -> Sequence[int]:
    """Positions in a leaf's own flattened batch that belong to elements of the store's."""
    batch_size = store.value_batch_sizes[path]
    if elements is None:
        return range(math.prod(batch_size))
    numbers: list[int] = spread(elements, math.prod(batch_size[len(store.spec.batch_size) :])).tolist()
    return numbers


def _path(key: content_pb2.Path) -> Path:
    return tuple(key.parts)


def _block(content: bytes) -> control_pb2.ValueBlock:
    try:
        return control_pb2.ValueBlock.FromString(content)
    except DecodeError:
        raise RemoteProtocolError(expected="values", received=f"{len(content)} bytes that are none") from None
