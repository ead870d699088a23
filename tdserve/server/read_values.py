"""Reads non-tensor values for local clients that cannot open a store's objects themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import encode_rows
from tdserve.server.opened_store import OpenedStore
from tdserve.server.workers import DataWorker
from tdserve.structure.tree import Path
from tdserve.v1 import worker_pb2


async def read_values(
    worker: DataWorker, entry: OpenedStore, paths: Sequence[Path], elements: NDArray[np.int64] | None
) -> bytes:
    """Returns the ValueBlock of these elements of the flattened batch; None: of all."""
    order = worker_pb2.Order()
    body = order.read_values
    body.store.CopyFrom(entry.ref(worker.known_specs))
    for path in paths:
        body.keys.add(parts=path)
    body.everything = elements is None
    if elements is not None:
        body.elements = encode_rows(elements)
    return (await worker.order(order)).values
