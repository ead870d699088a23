"""Reads of rows of replay tables by number: the session's mover sends them."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.messages.content import decode_paths, select_keys
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.turns import build_row_set, drop_references
from tdserve.server.mutations.row_write_hold import is_free, wait_for_others
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.tables.numbers import compute_row_numbers, plan_read
from tdserve.server.tables.samples import Samples
from tdserve.v1 import control_pb2


class RowReads:
    """Serves the readers of rows by number.

    Args:
        stores: All stores of the server.
        samples: Sends rows.
    """

    def __init__(self, stores: Stores, samples: Samples) -> None:
        self._stores = stores
        self._samples = samples

    async def read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        """Sends live rows by number, or some keys of them, without counting them as sampled. If some are being written,
        waits for the end of that.

        Raises:
            KeyNotFoundError: The rows have no such key.
            WrongStateError: The client expects a tensordict store, with another layout.
        """
        if not asked.fingerprint:
            raise self._stores.get(asked.store).make_kind_error("tensordict")
        deadline = Deadline.after(asked.timeout_s)
        while True:
            store = self._stores.get(asked.store)
            table = store.get_table()
            if asked.fingerprint != store.spec.fingerprint:
                raise store.make_older_store_error()
            select_keys(store.spec, decode_paths(asked.keys), store=store.name)  # before anything is sent
            numbers = await compute_row_numbers(from_message(asked.selection), table.state, lost=store.lost.row_set)
            if not (store.lost or store.writes):
                break
            rows = await build_row_set(Selection((numbers,)), (store.record.capacity,))
            store.lost.check(rows, store=store.name, remedy="they leave the table: extend it by others")
            if is_free(store, rows):
                break
            await wait_for_others(session, store, rows, deadline)  # by then the index may mean other rows
        plans = [await plan_read(table, numbers)]
        del numbers
        try:
            return await self._samples.send(session, request, store, plans[0], includes_spec=False, keys=asked.keys)
        finally:
            drop_references(plans, num_rows=len(plans[0].rows))
