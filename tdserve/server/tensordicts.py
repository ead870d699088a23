"""Reads and writes of rows that are there. A write is whole or absent: staged, journalled, then applied.

The content of a write first arrives in a staging file (or rides in the message). Then a journal entry says what will be
applied where, the rows become odd, a worker copies, the rows become even, and the journal entry goes together with the
answer's record. A crash anywhere behind the journal entry is repaired by applying it again; before it, nothing
happened.
"""

from __future__ import annotations

import asyncio
import logging

from tdserve.content import selected_spec, write_layout
from tdserve.deadline import Deadline
from tdserve.errors import (
    InvalidRequestError,
    PeerLostError,
    RemoteProtocolError,
    SpecMismatchError,
    StoreExistsError,
    TDServeError,
)
from tdserve.row_numbers import encode_rows
from tdserve.selection import from_message
from tdserve.server.answers import Answers
from tdserve.server.changes import generations_of
from tdserve.server.entry import Entry
from tdserve.server.held import Held
from tdserve.server.journal import JOURNAL, Journal
from tdserve.server.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.traffic import Traffic
from tdserve.server.workers import DataWorker
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

_log = logging.getLogger("tdserve.server")


class TensorDicts:
    """What sessions ask of tensordict stores.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
        values_worker: Writes non-tensor values, and applies staged content.
    """

    def __init__(self, stores: Stores, answers: Answers, *, values_worker: DataWorker, traffic: Traffic) -> None:
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._traffic = traffic
        self._staging_in_use: set[str] = set()

    async def read(
        self, session: ClientSession, request: int, entry: Entry, asked: control_pb2.ReadRequest, deadline: Deadline
    ) -> control_pb2.Done | None:
        """Sends a selection, as of one moment. None: the content follows over the channel."""
        if asked.HasField("newer_than"):
            if deadline.timeout_s == 0 and entry.content_version <= asked.newer_than:
                return control_pb2.Done(nothing_newer=True)
            await session.wait(
                entry.changed,
                lambda: entry if entry.content_version > asked.newer_than else None,
                deadline,
                lambda: f"content of {entry.name!r} newer than version {asked.newer_than}",
            )
        order = session.order(request)
        order.send_selection.store.CopyFrom(entry.ref(session.worker.known_specs))
        order.send_selection.selection.CopyFrom(asked.selection)
        order.send_selection.keys.extend(asked.keys)
        order.send_selection.inline_bytes = session.inline_limit(request)
        fingerprint = entry.spec.fingerprint
        accepted = control_pb2.Accepted(fingerprint=fingerprint, version=entry.content_version)
        if asked.fingerprint != fingerprint:
            accepted.spec.CopyFrom(self._stores.message_of(entry.spec))
        return await self._traffic.read(session, request, order, accepted, announces=False)

    async def create(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Fills a store for the first time, in place since nobody sees it, and shows it."""
        if asked.store in self._stores.catalog:
            raise StoreExistsError(name=asked.store)
        entry = self._stores.get_loading(asked.store, session.number)
        _check_fingerprint(entry, asked.content)
        receiving = self._receiving(session, request, entry, asked)
        await session.worker.order(receiving)
        if asked.content.values:
            storing = self._storing(entry, asked)
            storing.put_values.store.CopyFrom(entry.ref(self._worker.known_specs))
            await self._worker.order(storing)
        self._traffic.received(session.hello.transport, asked.content)
        entry.generation_values()[:] = 2
        done = control_pb2.Done(version=entry.content_version)
        entry.check_present()
        with self._answers.transaction(session.client_id, request, done.SerializeToString()) as txn:
            self._stores.publish_loaded(entry, txn)
        return done

    async def write(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Replaces a selection, whole or not at all.

        Raises:
            SpecMismatchError, SelectionError, CapacityError: Nothing was written.
            PeerLostError: The client or its worker went away before everything had arrived; nothing was written.
        """
        entry = self._stores.get(asked.store)
        if entry.generations is None:
            raise entry.wrong_kind("tensordict or replay")
        _check_fingerprint(entry, asked.content)
        _check_content(entry, asked)
        if entry.table is not None:
            _check_rows(entry, asked)
        staging = "" if not asked.content.message_nbytes else self._take_staging(entry)
        try:
            if staging:
                receiving = self._receiving(session, request, entry, asked, staging)
                await session.worker.order(receiving)
            self._traffic.received(session.hello.transport, asked.content)
            async with entry.write_lock:
                entry.check_present()
                done = control_pb2.Done(version=entry.content_version + 1)
                if entry.table is not None:
                    _check_rows(entry, asked)  # some may be gone since their content began to come
                journal = Journal(session.client_id, request, done, asked, staging)
                self._stores.db.put("pending", JOURNAL + entry.record.uid.encode(), journal.to_bytes())
                await self._apply(entry, journal)
        finally:
            self._staging_in_use.discard(staging)
        return done

    async def repair(self) -> int:
        """After a restart: applies what a crash has cut short; returns how many writes. A damaged store stays as it
        is."""
        num_applied = 0
        for key, content in self._stores.db.scan("pending", JOURNAL):
            try:
                entry = self._stores.find_uid(key[len(JOURNAL) :].decode())
                if entry is None:
                    self._stores.db.delete("pending", key)
                    continue
                await self._apply(entry, Journal.from_bytes(content))
                num_applied += 1
            except TDServeError as error:
                _log.error("a write that a crash had cut short cannot be completed: %s", error)
        return num_applied

    async def _apply(self, entry: Entry, journal: Journal) -> None:
        held = Held(entry, journal)
        failure: TDServeError | None = None
        try:
            if journal.asked.content.values:
                await self._insist(self._storing(entry, journal.asked), entry)
            applying = worker_pb2.Order()
            body = applying.apply_staged
            body.selection.CopyFrom(journal.asked.selection)
            body.keys.extend(journal.asked.keys)
            body.content.CopyFrom(journal.asked.content)
            body.content.ClearField("values")
            body.staging = journal.staging
            await self._insist(applying, entry)
        except TDServeError as error:
            failure = error  # such as no room for values: nothing of the tensors was touched
        held.let_go(is_written=failure is None)
        key = JOURNAL + entry.record.uid.encode()
        if failure is not None:
            self._stores.db.delete("pending", key)
            entry.changed.wake()
            raise failure
        answer = journal.done.SerializeToString()
        with self._answers.transaction(journal.client_id, journal.request, answer) as txn:
            txn.delete("pending", key)
        entry.changed.wake()

    async def _insist(self, order: worker_pb2.Order, entry: Entry) -> None:
        """Has an order carried out, again after each death of the worker: what is journalled must happen."""
        body = getattr(order, order.WhichOneof("body") or "")
        while True:
            await self._worker.ready.wait()
            body.store.CopyFrom(entry.ref(self._worker.known_specs))
            try:
                await self._worker.order(order)
                return
            except PeerLostError:
                await asyncio.sleep(0)

    def _receiving(
        self,
        session: ClientSession,
        request: int,
        entry: Entry,
        asked: control_pb2.WriteRequest,
        staging: str = "",
    ) -> worker_pb2.Order:
        order = session.order(request, is_accepted=bool(asked.content.message_nbytes))
        body = order.receive_selection
        body.store.CopyFrom(entry.ref(session.worker.known_specs))
        body.selection.CopyFrom(asked.selection)
        body.keys.extend(asked.keys)
        body.content.CopyFrom(asked.content)
        body.content.ClearField("values")
        body.staging = staging
        return order

    def _storing(self, entry: Entry, asked: control_pb2.WriteRequest) -> worker_pb2.Order:
        """An order for the values of a write. The store's ref is set when it is sent: a spec goes along only once."""
        order = worker_pb2.Order()
        body = order.put_values
        body.values = asked.content.values
        keys = [tuple(key.parts) for key in asked.keys]
        spec = entry.spec.select(keys, store=entry.name) if keys else entry.spec
        body.keys.extend(content_pb2.Path(parts=path) for path, _ in spec.values)
        selection = from_message(asked.selection)
        batch_size = entry.spec.batch_size
        body.everything = selection.is_everything
        if not body.everything:
            body.elements = encode_rows(selection.elements(batch_size))
        return order

    def _take_staging(self, entry: Entry) -> str:
        number = 0
        while (path := str(entry.folder / "staging" / str(number))) in self._staging_in_use:
            number += 1
        self._staging_in_use.add(path)
        return path


def _check_fingerprint(entry: Entry, content: control_pb2.Content) -> None:
    if content.fingerprint != entry.spec.fingerprint:
        raise SpecMismatchError(
            store=entry.name,
            key="",
            expected="the structure of this store",
            actual="that of an older store of this name",
        )


def _check_rows(entry: Entry, asked: control_pb2.WriteRequest) -> None:
    """Raises unless a write names live rows of a replay, and leaves that its rules do not look at."""
    keys = [tuple(key.parts) for key in asked.keys] or [path for path, _ in entry.spec.tensors]
    ruling = [path for path in keys for rule in entry.rule_keys if path == rule[: len(path)]]
    if ruling:
        reason = f"table {entry.name!r} orders its rows by {'.'.join(ruling[0])!r}, which must stay as it is"
        raise InvalidRequestError(argument="key", reason=reason)
    rows = from_message(asked.selection).rows(entry.spec.batch_size)
    generations = generations_of(asked.generations, len(rows))
    if generations is None:
        entry.replay_table().check_live(rows)
    else:
        entry.replay_table().check_same(rows, generations)


def _check_content(entry: Entry, asked: control_pb2.WriteRequest) -> None:
    """Raises unless the content has the size of what it replaces: what is journalled must be possible."""
    keys = [tuple(key.parts) for key in asked.keys]
    chosen = selected_spec(entry.spec, from_message(asked.selection), keys, store=entry.name)
    expected, content = write_layout(chosen).message_nbytes, asked.content
    inline = len(content.inline) if content.HasField("inline") else None
    if (inline is None and tuple(content.message_nbytes) != expected) or (
        inline is not None and inline != sum(expected)
    ):
        received = f"{sum(content.message_nbytes) if inline is None else inline} bytes"
        raise RemoteProtocolError(expected=f"{sum(expected)} bytes of content for {entry.name!r}", received=received)
