"""Reads non-tensor values for local clients that cannot open a store's objects themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import PIECE_ROWS, encode_rows
from tdserve.messages.value_columns import join_blocks
from tdserve.server.opened_store import OpenedStore
from tdserve.server.workers import DataWorker
from tdserve.structure.tree import Path
from tdserve.v1 import worker_pb2

_PART_ELEMENTS = PIECE_ROWS // 2
"""Elements whose values are read at a time: the report of short texts takes about a millisecond."""


async def read_values(
    worker: DataWorker,
    entry: OpenedStore,
    paths: Sequence[Path],
    elements: NDArray[np.int64],
    *,
    part_elements: int = _PART_ELEMENTS,
) -> bytes:
    """Returns the ValueBlock of these elements of the flattened batch; of very many, read a part at a time.

    Raises:
        TransferAbortedError: They were changed meanwhile.
    """
    blocks = []
    for start in range(0, max(len(elements), 1), part_elements):
        part = elements[start : start + part_elements]
        order = worker_pb2.Order()
        body = order.read_values
        body.store.CopyFrom(entry.make_ref(worker.known_specs))
        for path in paths:
            body.keys.add(parts=path)
        body.elements = encode_rows(part)
        blocks.append((len(part), (await worker.submit(order)).values))
    return blocks[0][1] if len(blocks) == 1 else await asyncio.to_thread(join_blocks, blocks)
