"""Non-tensor values that come with rows: one worker stores them, whichever mover moves the tensors."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from tdserve.messages.content import decode_paths, select_keys
from tdserve.messages.row_numbers import encode_rows, spread
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import StagingNames
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.mover import RowsToFill
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.values.value_codec import encode_nones


class ValueWrites:
    """Stores the non-tensor values of rows.

    Args:
        worker: The worker that writes values.

    Attributes:
        staging: Names of the files in which values pass from another worker to that one.
    """

    def __init__(self, worker: DataWorker) -> None:
        self.worker = worker
        self.staging = StagingNames("extend-")

    def store(self, store: OpenedStore, values: worker_pb2.PutValues) -> asyncio.Future[worker_pb2.Worked]:
        """Stores values of a store, whole or not at all."""
        order = worker_pb2.Order(put_values=values)
        order.put_values.store.CopyFrom(store.make_ref(self.worker.known_specs))
        return self.worker.submit(order)

    async def store_beside(self, moving: asyncio.Future[Any], store: OpenedStore, values: worker_pb2.PutValues) -> None:
        """Stores values while the tensors of their rows move; ends when nothing writes these rows any more."""
        storing = self.store(store, values)
        await asyncio.wait({moving, storing})
        faults = [future.exception() for future in (storing, moving)]  # asyncio logs exceptions that are not retrieved
        for fault in filter(None, faults):
            raise fault


def make_send_entries(store: OpenedStore, worker: DataWorker, asked: control_pb2.GetRequest) -> worker_pb2.SendEntries:
    """Returns the order that sends entries of a keyed store."""
    ref = store.make_ref(worker.known_specs)
    return worker_pb2.SendEntries(store=ref, keys=asked.keys, asks_versions=asked.asks_versions)


def make_put_values(rows: RowsToFill) -> worker_pb2.PutValues:
    """Returns the order that stores the values of reserved rows; the caller adds the store."""
    store, asked = rows.store, rows.asked
    if not (store.spec.values or asked.content.values or asked.content.values_nbytes):
        return worker_pb2.PutValues()
    spec = select_keys(store.spec, decode_paths(asked.keys), store=store.name)
    keys = spec.memo.get("value_keys")
    if keys is None:
        keys = spec.memo["value_keys"] = [content_pb2.Path(parts=path) for path, _ in spec.values]
    given = {path for path, _ in spec.values}
    lacking = [path for path, _ in store.spec.values if path not in given] if asked.keys else []
    return worker_pb2.PutValues(
        values=asked.content.values + encode_nones(len(lacking)),  # a reused row must not show its previous values
        keys=[*keys, *(content_pb2.Path(parts=path) for path in lacking)],
        elements=encode_rows(spread(rows.reservation.rows, math.prod(store.spec.batch_size[1:]))),
        is_whole=not lacking,  # the values are whole, even if tensors follow later
        is_bundled=asked.content.is_bundled,
    )
