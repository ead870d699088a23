"""Reads non-tensor values for local clients that cannot open a store's objects themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import encode_rows
from tdserve.server.opened_store import OpenedStore
from tdserve.server.workers import DataWorker
from tdserve.structure.tree import Path
from tdserve.v1 import content_pb2, worker_pb2


async def read_values(
    worker: DataWorker, entry: OpenedStore, paths: Sequence[Path], where: NDArray[np.int64] | content_pb2.Selection
) -> bytes:
    """Returns the ValueBlock of these elements of the flattened batch, or of a selection of the store."""
    order = worker_pb2.Order()
    body = order.read_values
    body.store.CopyFrom(entry.make_ref(worker.known_specs))
    for path in paths:
        body.keys.add(parts=path)
    if isinstance(where, content_pb2.Selection):
        body.selection.CopyFrom(where)
    else:
        body.elements = encode_rows(where)
    return (await worker.submit(order)).values
