"""Tables that came back from a checkpoint take the sampler and the limiter that the first program asks for.

A program that is started again with other settings is meant to continue with them, whatever those of the checkpoint
were.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError, StoreMovedError
from tdserve.base.ids import make_uid
from tdserve.rules.catalog import StoreRecord, explain_difference
from tdserve.rules.replay.settings import Settings
from tdserve.server.catalog.creation import Creation, explain_structure
from tdserve.server.catalog.seals import Seal
from tdserve.server.catalog.stores import Stores
from tdserve.server.moves.sealing import Sealing
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2

REST_S = 10.0
"""Time for requests under way to end; those that wait for rows are asked again."""

_NO_SESSION = 0

_log = logging.getLogger("tdserve.server")


class RestoredSettings:
    """Settles the settings of restored tables.

    Args:
        stores: All stores of the server.
        creation: Reads requests.
    """

    def __init__(self, stores: Stores, creation: Creation) -> None:
        self._stores = stores
        self._creation = creation
        self._sealing = Sealing(stores)

    async def settle(self, request: control_pb2.CreateStoreRequest) -> str:
        """Gives a table that was restored, and was not asked for since, the settings of this request for it.

        Args:
            request: The request to create the table.

        Returns:
            What was changed; "" if nothing was, since it has these settings, or differs in more than may change.

        Raises:
            StoreMovedError: Another request is doing the same, or has just added leaves.
            DeadlineExceededError: A client is still writing.
            StoreExistsError: Consumers have rows of it on lease. As after the others, nothing was changed.
        """
        known = self._stores.catalog.find(request.name)
        if known is None or not known.is_restored:
            return ""
        wanted, spec = self._creation.read(request)
        await self._stores.open_apart(wanted.name)
        store = self._stores.get(wanted.name)
        if store.record.kind != wanted.kind or explain_structure(store, wanted, spec) is not None:
            return ""
        return await self._settle(store, wanted)

    async def _settle(self, store: OpenedStore, wanted: StoreRecord) -> str:
        settled = replace(store.record, settings=wanted.settings, is_restored=False)
        table, asked = store.get_table(), Settings.from_json(wanted.settings)
        begins_trajectories = asked.sampler.uses_trajectories and not table.settings.sampler.uses_trajectories
        if (
            not table.settings.may_become(asked)
            or begins_trajectories
            or explain_difference(settled, wanted) is not None
        ):
            return ""
        changed = explain_difference(replace(settled, settings=table.settings.to_json()), wanted) or ""
        if not changed:
            self._stores.db.put("stores", store.name.encode(), settled.to_bytes())
            self._stores.catalog.replace(settled)
            store.record = settled
            return ""
        seal = Seal(_NO_SESSION, make_uid())
        self._sealing.begin(store, seal)
        try:
            resting = await self._sealing.wait_at_rest(store, seal, Deadline.after(REST_S), num_own_requests=1)
            if resting is not store:  # it has got leaves meanwhile: ask again
                raise StoreMovedError(name=store.name)
            if table.selectors.leases.num_leased:
                raise StoreExistsError(name=store.name, reason=f"{changed}; consumers have rows of it on lease")
            await self._reopen(store, settled, asked)
        finally:
            self._sealing.end(store.name, seal)
        _log.info("table %r, from a checkpoint, has taken the settings that were asked for: %s", store.name, changed)
        return changed

    async def _reopen(self, store: OpenedStore, settled: StoreRecord, asked: Settings) -> None:
        table, stores = store.get_table(), self._stores
        if asked.uses_priority and not table.settings.uses_priority:
            table.columns.priority[table.state.list_live_rows()] = 1.0  # as for rows that are written without one
        state = store.get_table_state()
        state.pop("settings", None)  # those that were changed before the checkpoint
        with stores.db.begin_transaction() as txn:
            txn.put("stores", store.name.encode(), settled.to_bytes())
            stores.save_state(store, txn, state)
        stores.catalog.replace(settled)
        stores.opened.retire(store.name)
        await stores.open_apart(store.name)
        stores.get(store.name)
