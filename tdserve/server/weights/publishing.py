"""Publishing of weights: a version is received into an invisible file and becomes visible whole, in one transaction."""

from __future__ import annotations

import time

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, CorruptDataError
from tdserve.base.failpoints import reach
from tdserve.rules.weights import UnfinishedVersion, VersionRecord, check_metadata
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.kinds.policies import wake_followers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import VersionToSend
from tdserve.server.weights.unpublished import Unpublished
from tdserve.server.weights.version_files import abandon, drop, finish, retire_unread
from tdserve.server.weights.version_sender import VersionSender
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MAX_KNOWN_SPECS = 64
"""Structures per session that are not sent again. More than clients rely on, since requests may overtake one
another."""


class Publishing:
    """Serves the requests of sessions for weights stores.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        versions: Sends published versions.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, versions: VersionSender) -> None:
        self._stores = stores
        self._answers = answers
        self._versions = versions
        self._unpublished = Unpublished(stores)

    async def publish(
        self, session: ClientSession, request: int, asked: control_pb2.PublishRequest
    ) -> control_pb2.Done:
        """Stores the next version of some weights. The first version makes their store visible.

        Raises:
            CapacityError: The disk is full. The version before stays the newest; without one there is no store.
            InvalidRequestError: The metadata are too long. The same holds.
            PeerLostError: The publisher or its worker was lost. The same holds.
            StoreNotFoundError: The store was deleted since.
        """
        check_metadata(asked.metadata)
        spec = self._learn_spec(session, asked)
        store = await self._unpublished.store(asked.store, spec, Deadline.after(asked.timeout_s))
        versions = store.get_versions()
        order = self._stores.specs.learn(spec)
        publishing = versions.begin(fingerprint=spec.fingerprint, order=order)
        try:
            drop(store, publishing.drops)
            await session.movers.writes.put_version(request, store, publishing, spec, asked.content)
            reach("publish.received")
            store.check_present()
            if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                self._give_up(store, publishing)  # a retry: it was committed over another session
                return answered
            kept = {record.version for record in versions.kept}
            done = control_pb2.Done(version=versions.next_number)
            answer = done.SerializeToString()
            # The change of the versions becomes visible only when it is on record; if recording fails, it is undone.
            with versions.undo_on_error(), self._answers.begin_transaction(session.client_id, request, answer) as txn:
                drops = self._commit(store, publishing, spec, asked, txn)
        except BaseException as error:
            self._give_up(store, publishing)
            if isinstance(error, (CorruptDataError, ClosedError)):
                store.check_present()  # its deletion has removed the files
            raise
        reach("publish.recorded")
        for version in kept - {record.version for record in versions.kept}:
            retire_unread(store, version)
        drop(store, drops)
        store.spec = spec
        store.readers.note_published(done.version)
        store.waiters.wake()
        self._versions.relays.announce(store)
        wake_followers(self._stores, store.name)
        self._versions.make_checksums(store, session.worker)
        return done

    def _commit(
        self,
        store: OpenedStore,
        publishing: UnfinishedVersion,
        spec: Spec,
        asked: control_pb2.PublishRequest,
        txn: Transaction,
    ) -> tuple[int, ...]:
        """Makes a version the newest, as part of a transaction; returns the versions whose files can be deleted."""
        versions = store.get_versions()
        dropped = versions.set_keep(asked.keep) if asked.keep else ()
        versions.fanout = asked.fanout or versions.fanout
        finish(store, publishing, versions.next_number)
        reach("publish.numbered")
        drops = versions.commit(publishing, time.time(), nbytes=spec.nbytes, metadata=asked.metadata)
        self._stores.save_state(store, txn, versions.get_state())
        self._unpublished.show(store, txn)
        return dropped + drops

    async def send_latest(
        self, session: ClientSession, request: int, asked: control_pb2.LatestRequest
    ) -> control_pb2.Done | None:
        """Sends a certain version, or the newest, waiting for one if need be, or only the newest one's number. Returns
        None if the content follows over the channel.

        Raises:
            VersionNotFoundError: The requested version is not kept.
        """
        deadline = Deadline.after(asked.timeout_s)
        if deadline.timeout_s == 0 and asked.HasField("newer_than") and self._has_nothing_newer(asked):
            return control_pb2.Done(nothing_newer=True)
        await inline_tasks.ensure_task()
        with session.mark_waiting():
            store = await self._stores.wait(asked.store, deadline)
        versions = store.get_versions()
        newer_than = asked.newer_than if asked.HasField("newer_than") else 0

        def look() -> VersionRecord | None:
            newest = versions.newest
            return newest if newest is not None and newest.version > newer_than else None

        if asked.HasField("version"):
            version = versions.get(asked.version)
        else:
            found = await session.wait(
                store.waiters, look, deadline, lambda: f"a version of {store.name!r} newer than {newer_than}"
            )
            version = versions.newest or found  # the one found may have been retired before this task resumed
            if asked.without_content:
                return control_pb2.Done(version=version.version)
        done = await session.movers.reads.get_version(request, VersionToSend(store, version, asked, deadline))
        store.readers.note_read(session, version.version)
        return done

    def _has_nothing_newer(self, asked: control_pb2.LatestRequest) -> bool:
        store = self._stores.find(asked.store)
        newest = store.get_versions().newest if store is not None else None
        return newest is None or newest.version <= asked.newer_than

    def _learn_spec(self, session: ClientSession, asked: control_pb2.PublishRequest) -> Spec:
        """Returns the structure in the request, or else the last one with this fingerprint that the session has
        sent."""
        specs, known_specs = self._stores.specs, session.known_specs
        if asked.HasField("spec"):
            sent = codec.decode(asked.spec)
            known_specs.pop(sent.fingerprint, None)
            known_specs[sent.fingerprint] = specs.get(
                sent.fingerprint, specs.learn(sent)
            )  # one object for all sessions
            while len(known_specs) > MAX_KNOWN_SPECS:
                del known_specs[next(iter(known_specs))]
        fingerprint = asked.content.fingerprint
        spec = known_specs.get(fingerprint)
        return specs.get(fingerprint) if spec is None else spec

    def _give_up(self, store: OpenedStore, publishing: UnfinishedVersion) -> None:
        """Removes all traces of a failed publish; if it was the first of its store, the name too."""
        versions = store.get_versions()
        drops = versions.abort(publishing)
        try:
            abandon(store, publishing)
            drop(store, (*drops, versions.next_number))  # recording may have failed when the file had its number
        finally:
            self._unpublished.give_up(store)
