"""Writes over existing rows. A write is whole or absent: staged, journalled, then applied.

The content of a write first arrives in a staging file (or inside the message). Then a journal entry, together with the
answer, records what will be applied where: this decides the write. The rows become odd, a worker copies, the rows
become even, and the answer's record replaces the journal entry, for which there is always room. After a crash behind
the journal entry the write is applied again; before it, nothing has happened.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    PeerLostError,
    RemoteProtocolError,
    StructureChangedError,
    TDServeError,
)
from tdserve.base.failpoints import reach
from tdserve.messages.content import (
    check_inline,
    decode_paths,
    may_be_packed,
    select_keys,
    select_spec,
    write_layout,
    write_messages,
)
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import from_message
from tdserve.messages.store_kinds import describe_kind
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.creation import Creation
from tdserve.server.catalog.packed_stores import PACKED_VERSION, make_content
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.execution.turns import build_row_set
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.row_files import FILLED
from tdserve.server.mutations.damage_checks import DamageChecks
from tdserve.server.mutations.row_write_hold import (
    Check,
    RowDemands,
    RowWriteHold,
    do_nothing,
    hold_rows,
    is_free,
    look_at_rows,
    wait_for_others,
)
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import StagingNames, make_values_path
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.journal import JOURNAL, Journal
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.mover import StoreToFill
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.tensordicts.expected_generations import Generations, find_expected
from tdserve.server.tensordicts.in_place import InPlace
from tdserve.store.exchange.spools import remove_spool
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

_log = logging.getLogger("tdserve.server")


class Writes:
    """Serves writes to tensordict stores, and over rows of replay tables.

    Args:
        stores: All stores of the server.
        creation: Creates stores.
        answers: Answers to committed requests, for their retries.
        values_worker: The worker that writes non-tensor values and applies staged content.
        traffic: Counts transfers.
    """

    def __init__(
        self,
        stores: Stores,
        creation: Creation,
        answers: CommittedAnswers,
        *,
        values_worker: DataWorker,
        traffic: Traffic,
    ) -> None:
        self._creation = creation
        self._in_place = InPlace(stores, answers)
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._damage_checks = DamageChecks(values_worker)
        self._traffic = traffic
        self._staging = StagingNames()

    async def create(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Creates a store with its first content, which is written in place since it is invisible. If that fails, its
        name is free again.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        wanted, spec = self._creation.read(asked.new_store)
        if wanted.name != asked.store or KINDS[wanted.kind].has_rules:
            reason = f"{describe_kind(wanted.kind)}, {wanted.name!r}, is not created by a write to {asked.store!r}"
            raise InvalidRequestError(argument="new_store", reason=reason)
        _check_fingerprint(wanted, spec, asked.content)
        is_packed = asked.content.HasField("inline") and may_be_packed(spec, len(asked.content.values))
        if is_packed:
            await self._stores.seals.wait_for_creation()
        store = await self._creation.find_begun(session.number, wanted, spec)
        if store is None and is_packed:
            check_inline(asked.content, write_layout(spec))
            content, packed = make_content(spec, asked.content), self._stores.make_packed(wanted, spec)
            done = control_pb2.Done(version=packed.former_version + PACKED_VERSION)
            with self._answers.begin_transaction(session.client_id, request, done.SerializeToString()) as txn:
                self._stores.pack(packed, content, txn)
            if self._stores.packed.is_full:
                self._stores.find(wanted.name)
            return done
        store = store or await self._creation.begin_filling(session.number, wanted, spec)
        store.is_filling = True
        try:
            return await self._fill_and_show(session, request, store, asked)
        except BaseException:
            if not session.movers.may_still_write(request):  # else the store is deleted with its session
                await self._stores.delete(store)
            raise
        finally:
            store.is_filling = False

    async def _fill_and_show(
        self, session: ClientSession, request: int, store: OpenedStore, asked: control_pb2.WriteRequest
    ) -> control_pb2.Done:
        content = asked.content
        with self._staging.borrow(store, is_needed=bool(content.values_nbytes)) as staging:
            spool = make_values_path(staging)
            await session.movers.writes.fill(
                request, StoreToFill(store.name, store.record.uid, store.make_ref, spool), content
            )
            if content.values or spool or content.spool_nbytes:
                storing = self._make_storing_order(store, asked)
                session.movers.writes.locate_values(content, storing.put_values, spool)
                storing.put_values.store.CopyFrom(store.make_ref(self._worker.known_specs))
                await self._worker.submit(storing)
            if spool:  # no other request will use it soon, and it may be as large as the store
                await asyncio.to_thread(remove_spool, spool)
        await asyncio.to_thread(store.get_generation_values().fill, FILLED)  # touches its pages for the first time
        done = control_pb2.Done(version=store.content_version)
        reach("filling.received")
        store.check_present()
        with self._answers.begin_transaction(session.client_id, request, done.SerializeToString()) as txn:
            self._stores.publish_loaded(store, txn)
        reach("filling.recorded")
        return done

    async def write(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Replaces a selection, whole or not at all.

        Raises:
            ReadOnlyError, SpecMismatchError, SelectionError, CapacityError: Nothing was written.
            NotSupportedError: It has non-tensor values, and the store is adopted; nothing was written.
            PeerLostError: The client or its worker was lost before all content had arrived; nothing was written.
        """
        store = self._stores.loading.find_hidden(asked.store, session.number) or self._stores.get(asked.store)
        store.check_kind(asked.kind)
        if asked.identity and asked.identity != store.identity:
            expected, actual = "the store that was there", "another one, or with other keys; it was not written"
            raise StructureChangedError(store=store.name, key="", expected=expected, actual=actual)
        if store.generations is None:
            raise store.make_kind_error("tensordict or replay")
        store.check_writable()
        _check_fingerprint(store.record, store.spec, asked.content)
        if store.record.adopted:
            store.check_values_writable(decode_paths(asked.keys))
        if store.table is not None:  # some may be gone by the time their content has arrived
            store.table.state.take_back_claims()
            rows = await build_row_set(from_message(asked.selection), store.spec.batch_size)
            generations = await find_expected(store, asked)
            await look_at_rows(store.table, rows, _check_of(store, asked, generations))
        return await session.movers.writes.overwrite(request, store, asked)

    async def write_staged(
        self, session: ClientSession, request: int, store: OpenedStore, asked: control_pb2.WriteRequest
    ) -> control_pb2.Done:
        """Has the session's worker receive the content, and applies it once all has arrived."""
        await _check_content(store, asked)
        with self._staging.borrow(store, is_needed=bool(asked.content.message_nbytes)) as staging:
            if staging:
                await session.worker.submit(_make_receive_order(session, request, store, asked, staging))
            self._traffic.count_received(session.transport, asked.content)
            reach("overwrite.staged")
            async with self._hold_alone(session, store, asked):
                if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                    return answered  # a retry: committed over an ended session
                rows = await build_row_set(from_message(asked.selection), store.spec.batch_size)
                wanted = self._make_demands(store, rows, asked, await find_expected(store, asked))
                async with hold_rows(store, rows, decode_paths(asked.keys), wanted) as held:
                    _check_fingerprint(store.record, store.spec, asked.content)  # the keys may have changed since
                    done = control_pb2.Done(version=store.content_version + 1)
                    journal = Journal(session.client_id, request, done, asked, staging)
                    self._stores.db.put("pending", JOURNAL + store.record.uid.encode(), journal.to_bytes())
                    reach("overwrite.journalled")
                try:
                    await self._apply(store, journal, held)
                finally:
                    if self._stores.db.owes:  # a restart may find the journal entry and apply it again
                        self._staging.keep(staging)
        return done

    async def write_in_place(
        self,
        session: ClientSession,
        client: LocalClient,
        request: int,
        store: OpenedStore,
        asked: control_pb2.WriteRequest,
    ) -> control_pb2.Done:
        """Has the local client copy the content over the old content."""
        storing = self._make_storing_order(store, asked)
        session.movers.writes.locate_values(asked.content, storing.put_values, "")

        async def store_values() -> None:
            await self._worker.order_until_done(store, storing)

        rows = await build_row_set(from_message(asked.selection), store.spec.batch_size)
        expected = await find_expected(store, asked)
        await self._wait_for_rows(session, store, rows, Deadline.after(asked.timeout_s))
        if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
            return answered
        _check_fingerprint(store.record, store.spec, asked.content)  # the keys may have changed since
        self._traffic.count_received(session.transport, asked.content)

        wanted = self._make_demands(store, rows, asked, expected)
        return await self._in_place.write(session, client, request, store, asked, rows, wanted, store_values)

    def _make_demands(
        self, store: OpenedStore, rows: RowSet, asked: control_pb2.WriteRequest, expected: Generations | None
    ) -> RowDemands:
        compare = partial(self._damage_checks.check_write, store, rows, asked)
        return RowDemands(_check_of(store, asked, expected), compare)

    @asynccontextmanager
    async def _hold_alone(
        self, session: ClientSession, store: OpenedStore, asked: control_pb2.WriteRequest
    ) -> AsyncIterator[None]:
        """Runs a block in which no other request writes these rows. While it waits for that, it does not hold up other
        writes."""
        deadline = Deadline.after(asked.timeout_s)
        while True:
            async with store.write_lock:
                store.check_current()
                if not (store.writes or store.lost):
                    yield
                    return
                rows = await build_row_set(from_message(asked.selection), store.spec.batch_size)
                if self._is_free(store, rows):
                    yield
                    return
            await self._wait_for_rows(session, store, rows, deadline)

    def _is_free(self, store: OpenedStore, rows: RowSet) -> bool:
        return is_free(store, rows) and not self._stores.unfinished_writes.may_be_written(store, rows)

    async def _wait_for_rows(
        self, session: ClientSession, store: OpenedStore, rows: RowSet, deadline: Deadline
    ) -> None:
        """Waits until no other request writes these rows or still can, and no journalled write is being applied."""
        while True:
            await wait_for_others(session, store, rows, deadline)
            await self._in_place.wait_for_writers(session, store, rows, deadline)
            if store.write_lock.locked():
                async with store.write_lock:  # held for as long as a worker copies
                    pass
            elif self._is_free(store, rows):  # else another one that waited came first
                break
        store.check_current()

    async def repair(self) -> int:
        """Applies, after a restart, the writes that a crash interrupted. A damaged store stays as it is.

        Returns:
            Number of applied writes.
        """
        num_applied = 0
        for key, content in self._stores.db.scan("pending", JOURNAL):
            try:
                store = self._stores.find_uid(key[len(JOURNAL) :].decode())
                if store is None:
                    self._stores.db.delete("pending", key)
                    continue
                journal = Journal.from_bytes(content)
                rows = await build_row_set(journal.selection, store.spec.batch_size)
                if journal.is_applied(rows, store.get_generation_values(), store.content_version):
                    self._forget(store, journal, {})
                else:
                    held = RowWriteHold(store, rows, decode_paths(journal.asked.keys))
                    await held.hold()
                    await held.hide()
                    await self._apply(store, journal, held, is_repeated=True)
                    num_applied += 1
            except TDServeError as error:
                _log.error("a write that a crash had cut short cannot be completed: %s", error)
        return num_applied

    async def _apply(
        self, store: OpenedStore, journal: Journal, held: RowWriteHold, *, is_repeated: bool = False
    ) -> None:
        failure: TDServeError | None = None
        is_untouched = not is_repeated
        try:
            spool = make_values_path(journal.staging) if journal.asked.content.values_nbytes else ""
            if journal.asked.content.values or spool:
                await self._worker.order_until_done(store, self._make_storing_order(store, journal.asked, spool=spool))
            is_untouched = False
            applying = worker_pb2.Order()
            body = applying.apply_staged
            body.selection.CopyFrom(journal.asked.selection)
            body.keys.extend(journal.asked.keys)
            body.content.CopyFrom(journal.asked.content)
            body.content.ClearField("values")
            body.staging = journal.staging
            await self._worker.order_until_done(store, applying)
            reach("overwrite.applied")
        except PeerLostError as error:
            lost = self._lose(store, journal, held, error)
            if not is_repeated:  # else its caller does that
                _log.error("a write to store %r is given up: %s", store.name, lost)
            raise lost from error
        except TDServeError as error:
            failure = error  # for example no room for values: the tensors are untouched
        rewritten = store.lost.replace_written(held.rows, decode_paths(journal.asked.keys)) if failure is None else {}

        def forget() -> None:
            if failure is None:
                self._forget(store, journal, rewritten)
            else:
                self._stores.db.delete("pending", JOURNAL + store.record.uid.encode())

        await held.let_go(is_written=failure is None, is_untouched=failure is not None and is_untouched, then=forget)
        store.waiters.wake()
        if failure is not None:
            raise failure

    def _lose(self, store: OpenedStore, journal: Journal, held: RowWriteHold, cause: PeerLostError) -> CorruptDataError:
        """Gives up a write of which the worker dies each time: its rows are lost, like those that a loss of power has
        damaged. Else each start of the server would begin with it. Returns the error for the caller."""
        uid, keys = store.record.uid, tuple(decode_paths(journal.asked.keys))
        numbers = [each.request for each in store.lost.overwrites if each.lock_name == POWER_LOSS]
        overwrite = Overwrite(uid, POWER_LOSS, max(numbers, default=0) + 1, held.rows, keys)
        with self._stores.db.begin_transaction(is_decided=True) as txn:
            overwrite.save(txn)
            txn.delete("pending", JOURNAL + uid.encode())
        held.end()
        self._stores.unfinished_writes.lose(store, overwrite)
        store.waiters.wake()
        where = store.record.adopted or str(store.folder)
        actual = (
            f"{cause}; the log names the cause, such as a full disk; the rows are lost until they are written again"
        )
        return CorruptDataError(path=where, expected="files that can be written", actual=actual)

    def _forget(self, store: OpenedStore, journal: Journal, changes: Mapping[bytes, bytes | None]) -> None:
        """Replaces the journal entry of an applied write with its answer, in one transaction with other recorded
        changes."""
        answer = journal.done.SerializeToString()
        with self._answers.begin_transaction(journal.client_id, journal.request, answer, is_decided=True) as txn:
            txn.delete("pending", JOURNAL + store.record.uid.encode())
            txn.update("pending", changes)
        reach("overwrite.answered")

    def _make_storing_order(
        self, store: OpenedStore, asked: control_pb2.WriteRequest, *, spool: str = ""
    ) -> worker_pb2.Order:
        """Returns the order that stores the values of a write. The caller sets the store's ref on sending: a spec is
        sent only once."""
        order = worker_pb2.Order()
        body = order.put_values
        body.values = asked.content.values
        if spool:
            body.spool, body.spool_nbytes = spool, asked.content.values_nbytes
        spec = select_keys(store.spec, decode_paths(asked.keys), store=store.name)
        body.keys.extend(content_pb2.Path(parts=path) for path, _ in spec.values)
        body.selection.CopyFrom(asked.selection)
        return order


def _make_receive_order(
    session: ClientSession, request: int, store: OpenedStore, asked: control_pb2.WriteRequest, staging: str
) -> worker_pb2.Order:
    order = session.make_order(request, is_accepted=bool(asked.content.message_nbytes))
    body = order.receive_selection
    body.store.CopyFrom(store.make_ref(session.worker.known_specs))
    body.selection.CopyFrom(asked.selection)
    body.keys.extend(asked.keys)
    body.content.CopyFrom(asked.content)
    body.content.ClearField("values")
    body.staging, body.spool = staging, make_values_path(staging)
    return order


def _check_fingerprint(record: StoreRecord, spec: Spec, content: control_pb2.Content) -> None:
    if content.fingerprint != spec.fingerprint:
        older = "that it had before" if record.structure else "that of an older store of this name"
        raise StructureChangedError(store=record.name, key="", expected="the structure of this store", actual=older)


def _check_of(store: OpenedStore, asked: control_pb2.WriteRequest, expected: Generations | None) -> Check:
    """Returns a check that rows of a replay are still those that a write means.

    Args:
        expected: As in :func:`find_expected`.

    Raises:
        InvalidRequestError: The write has leaves that the table's rules need.
    """
    if store.table is None:
        return do_nothing
    keys = decode_paths(asked.keys) or [path for path, _ in store.spec.tensors]
    ruling = [path for path in keys for rule in store.rule_keys if path == rule[: len(path)]]
    if ruling:
        reason = f"table {store.name!r} orders its rows by {'.'.join(ruling[0])!r}, which must stay as it is"
        raise InvalidRequestError(argument="key", reason=reason)
    if expected is None:
        return do_nothing
    compare = store.table.state.check_unchanged if asked.has_stamps else store.table.state.check_same
    return lambda rows, places: compare(rows, expected[places])


async def _check_content(store: OpenedStore, asked: control_pb2.WriteRequest) -> None:
    """Raises unless the content has the size of what it replaces: a journalled write must be possible."""
    selection = from_message(asked.selection)
    choose = partial(select_spec, store.spec, selection, decode_paths(asked.keys), store=store.name)
    chosen = await asyncio.to_thread(choose) if selection.is_long else choose()
    layout, content = write_layout(chosen), asked.content
    if not content.HasField("inline"):
        write_messages(layout, content.values_nbytes, content.message_nbytes)
    elif content.values_nbytes or len(content.inline) != sum(layout.message_nbytes):
        expected = f"{sum(layout.message_nbytes)} bytes of content for {store.name!r}"
        raise RemoteProtocolError(expected=expected, received=f"{len(content.inline) + content.values_nbytes} bytes")
