"""Changes, reads and listings of entries: numbered, ordered and acknowledged here, carried out by the data workers."""

from __future__ import annotations

import time

from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, SpecMismatchError, WrongStateError
from tdserve.base.failpoints import reach
from tdserve.base.ids import REQUEST_BYTES
from tdserve.rules.kv.entry_changes import check_num_keys
from tdserve.rules.kv.keyed_state import KeyedState
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.kinds.keyed_kind import read_tables
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import StagingNames, make_values_path
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import StoreToFill
from tdserve.v1 import control_pb2, worker_pb2


class KeyedEntries:
    """Serves the clients of keyed stores.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        values_worker: The worker that changes entries.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, values_worker: DataWorker) -> None:
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._staging = StagingNames("put-")

    async def put(self, session: ClientSession, request: int, asked: control_pb2.PutRequest) -> control_pb2.Done | None:
        """Puts entries, all or none. For refused content see ``ClientSession.discard``.

        Raises:
            VersionConflictError, CapacityError, SpecMismatchError, InvalidRequestError: Nothing was changed.
        """
        store, content = self._stores.get(asked.store), asked.content
        _check_structure(store, asked.fingerprint)
        check_num_keys(asked.keys)
        order = worker_pb2.ChangeEntries(keys=asked.keys, if_versions=asked.if_versions)
        with self._staging.borrow(store, is_needed=bool(content.values_nbytes)) as staging:
            spool = make_values_path(staging)
            if content.message_nbytes:
                filled = StoreToFill(store.name, store.record.uid, store.make_ref, spool)
                await session.movers.writes.fill(request, filled, content)
            order.values.values = content.values
            session.movers.writes.locate_values(content, order.values, spool)
            return await self._change(session, request, store, order)

    async def remove(
        self, session: ClientSession, request: int, asked: control_pb2.RemoveRequest
    ) -> control_pb2.Done | None:
        """Removes entries, all or none.

        Raises:
            VersionConflictError, KeyNotFoundError, SpecMismatchError, InvalidRequestError: Nothing was changed.
        """
        store = self._stores.get(asked.store)
        _check_structure(store, asked.fingerprint)
        check_num_keys(asked.keys)
        order = worker_pb2.ChangeEntries(
            keys=asked.keys, if_versions=asked.if_versions, removes=True, skips_missing=asked.skips_missing
        )
        return await self._change(session, request, store, order)

    async def get(self, session: ClientSession, request: int, asked: control_pb2.GetRequest) -> control_pb2.Done | None:
        """Sends entries, once there are all.

        Raises:
            KeyNotFoundError: One is absent, and the timeout is 0.
            DeadlineExceededError: One was absent all the time.
        """
        deadline = Deadline.after(asked.timeout_s)
        store = self._stores.get(asked.store)
        state = _check_structure(store, asked.fingerprint)
        check_num_keys(asked.keys)
        if deadline.timeout_s == 0 or asked.asks_versions:
            return await session.movers.entries.get_entries(request, store, asked)
        with state.watches.watch(asked.keys) as watch:
            while True:
                watch.is_notified = False
                try:
                    return await session.movers.entries.get_entries(request, store, asked)
                except KeyNotFoundError as error:
                    what = f"a put of entry {error.fields['key']!r} in keyed store {store.name!r}"
                    await session.wait_until(store.waiters, lambda: watch.is_notified, deadline, lambda: what)  # noqa: B023 (called in this turn)

    async def list(self, session: ClientSession, request: int, asked: control_pb2.ListRequest) -> control_pb2.Done:
        """Lists a page of keys, or counts them."""
        store = self._stores.get(asked.store)
        _check_structure(store, asked.fingerprint)
        order = worker_pb2.Order()
        order.list_entries.store.CopyFrom(store.make_ref(session.worker.known_specs))
        order.list_entries.request.CopyFrom(asked)
        return control_pb2.Done.FromString((await session.worker.submit(order)).answer)

    def record_answers(self, store: OpenedStore) -> None:
        """Records the answers that only a store has: those of changes that were committed when this process was killed.

        Call it before the store goes elsewhere: the retries come to this server.

        Raises:
            CorruptDataError: One is damaged. Some may be on record.
        """
        with read_tables(store) as tables:
            answers = [] if tables is None else tables.list_answers()
        for request, answer in answers:
            self._record(request[:-REQUEST_BYTES], int.from_bytes(request[-REQUEST_BYTES:], "big"), answer)

    async def _change(
        self, session: ClientSession, request: int, store: OpenedStore, change: worker_pb2.ChangeEntries
    ) -> control_pb2.Done | None:
        """Has a change carried out, and records its answer; returns it unless the worker has sent it.

        The worker commits change and answer together, and repeats the answer if it has one: so a crash at any moment
        leaves both or neither, and a retry, wherever it comes from, finds the answer there or here. Therefore a worker
        that has the client's mail may answer at once.
        """
        state, client_id = store.get_keyed(), session.client_id
        answered = self._answers.find_earlier(client_id, request)  # again: its content may have come in the meantime
        if answered is not None:
            return answered
        # The worker forgets these answers: they must be on the disk here, and not only owed.
        recorded = [] if self._stores.db.owes else list(state.recorded)
        change.store.CopyFrom(store.make_ref(self._worker.known_specs))
        change.settings, change.now_s = store.record.settings, time.time()
        change.client_id, change.request = client_id, request
        change.recorded.extend(recorded)
        if request in session.mailed_requests and session.worker is self._worker:
            change.mail_session = session.number
        worked = await self._worker.submit(worker_pb2.Order(change_entries=change))
        reach("put.reported")
        for name in recorded:
            state.recorded.pop(name, None)
        if state.watches.notify(change.keys):
            store.waiters.wake()
        self._record(client_id, request, worked.answer)
        state.recorded[client_id + request.to_bytes(REQUEST_BYTES, "big")] = None
        return None if worked.is_mailed else control_pb2.Done.FromString(worked.answer)

    def _record(self, client_id: bytes, request: int, answer: bytes) -> None:
        try:
            if self._answers.find_earlier(client_id, request) is not None:
                return  # another attempt of it got the same answer
        except WrongStateError:
            return  # the client has got it, and has reported that already
        with self._answers.begin_transaction(client_id, request, answer, is_decided=True):
            pass


def _check_structure(store: OpenedStore, fingerprint: bytes) -> KeyedState:
    """Returns the state of a keyed store, if its entries have the structure that a client knows.

    Raises:
        WrongStateError: It is a store of another kind.
        SpecMismatchError: It was created again, for other entries.
    """
    state = store.get_keyed()
    if fingerprint != store.spec.fingerprint:
        reason = f"those of another store that had this name; open it again: client[{store.name!r}]"
        raise SpecMismatchError(store=store.name, expected="entries of its own structure", actual=reason)
    return state
