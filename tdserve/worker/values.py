"""Non-tensor values on their way between messages and a store's objects; this process never looks inside one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tdserve.errors import CorruptDataError, RemoteProtocolError
from tdserve.row_numbers import decode_rows
from tdserve.spec.tree import Path
from tdserve.store.objects import ALL_ROWS
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.worker.opened import OpenStore

Elements = npt.NDArray[np.int64]


def read_values(store: OpenStore, paths: Sequence[Path], elements: Elements | None) -> bytes:
    """The ValueBlock of these elements of the flattened batch; ``None`` is all of it, in order.

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
        rows: Sequence[int] = [ALL_ROWS]
        if column.per_row:
            found = np.arange(int(np.prod(store.spec.batch_size))) if elements is None else elements
            rows = [int(row) for row in found]
        (values,) = objects.get_many(rows, [path])
        for row, value in zip(rows, values):
            if value is None:
                raise CorruptDataError(path=str(store.folder), expected=f"a value of {path} at row {row}", actual="none")
            column.values.append(value)
    return block.SerializeToString()


def put_values(store: OpenStore, order: worker_pb2.PutValues) -> None:
    """Stores a ValueBlock; only the one writing worker is asked to.

    Raises:
        CapacityError: The environment is full; nothing was stored.
        RemoteProtocolError: The block does not fit the keys; nothing was stored.
    """
    objects = store.objects(writable=True)
    assert objects is not None
    block = control_pb2.ValueBlock.FromString(order.values)
    paths = [_path(key) for key in order.keys]
    if len(block.columns) != len(paths):
        raise RemoteProtocolError(expected=f"{len(paths)} columns of values", received=f"{len(block.columns)}")
    elements = decode_rows(order.elements) if not order.everything else None
    size = int(np.prod(store.spec.batch_size)) if elements is None else len(elements)
    items: list[tuple[int, Path, bytes]] = []
    cleared: list[Path] = []
    for path, column in zip(paths, block.columns):
        if len(column.values) != (size if column.per_row else 1):
            received = f"{len(column.values)} values of {path}"
            raise RemoteProtocolError(expected=f"{size} values, or one for all", received=received)
        if elements is None:
            cleared.append(path)
        if elements is None and not column.per_row:
            items.append((ALL_ROWS, path, column.values[0]))
            continue
        if not objects.has_rows(path):
            ((held,),) = objects.get_many([ALL_ROWS], [path])
            if held is not None and all(value == held for value in column.values):
                continue  # as in tensordict: a row that gets the value of all rows has no value of its own
        values = column.values if column.per_row else [column.values[0]] * size
        rows = range(size) if elements is None else elements
        items += [(int(row), path, value) for row, value in zip(rows, values)]
    objects.put_many(items, clear=cleared)


def _path(key: content_pb2.Path) -> Path:
    return tuple(key.parts)
