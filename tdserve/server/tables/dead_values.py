"""Non-tensor values of rows that have left their table: they stay until other rows take their places."""

from __future__ import annotations

import asyncio
import logging

from tdserve.base.errors import CapacityError, CorruptDataError, TDServeError
from tdserve.server.catalog.stores import Stores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.store.values import object_folders
from tdserve.store.values.objects import VALUES
from tdserve.v1 import worker_pb2

_log = logging.getLogger("tdserve.server")


class DeadValues:
    """Drops dead values when there is no room for others.

    Dropping them at once would cost a commit for every consumed row; later, most of them are replaced at no cost.

    Args:
        stores: All stores of the server.
        values_worker: The worker that writes non-tensor values.
    """

    def __init__(self, stores: Stores, values_worker: DataWorker) -> None:
        self._stores = stores
        self._worker = values_worker
        self._under_way: dict[str, asyncio.Task[bool]] = {}

    async def make_room(self, name: str, error: CapacityError) -> bool:
        """Drops dead values after a write that found no room and left nothing behind. Returns whether there is more
        room now.

        Args:
            name: Name of the store.
            error: Error of the write. If the room that is missing is not for values, nothing is dropped: the values
                found may be the write's own.
        """
        try:
            store = self._stores.find(name)
        except (CorruptDataError, CapacityError):  # the second: it was the files of the store that found no room
            return False
        if store is None or store.table is None or not store.spec.values:
            return False
        what = str(error.fields["what"])
        if not what.startswith((VALUES, str(store.folder / object_folders.NAME))):
            return False
        uid = store.record.uid
        task = self._under_way.get(uid)
        if task is None:
            task = self._under_way[uid] = asyncio.create_task(self._drop(store), name="tdserve-dead-values")
            task.add_done_callback(lambda _: self._under_way.pop(uid))
        return await asyncio.shield(task)  # others may wait for it too

    async def _drop(self, store: OpenedStore) -> bool:
        """Drops them; returns whether there were any. The rows are reserved meanwhile, since values of new rows would
        be dropped too."""
        reservation = store.get_table().ring.reserve_holes()
        if reservation is None:
            return False
        order = worker_pb2.Order()
        order.drop_values.store.CopyFrom(store.make_ref(self._worker.known_specs))
        order.drop_values.rows = reservation.encoded
        try:
            return (await self._worker.submit(order)).num_dropped > 0
        except TDServeError as error:
            _log.warning("values of rows that have left %r could not be dropped: %s", store.name, error)
            return False
        finally:
            store.get_table().ring.abort(reservation)
            store.waiters.wake()
