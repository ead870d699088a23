"""Weights: a version is received into a file that nobody sees, then becomes visible whole, in one transaction."""

from __future__ import annotations

import time
from pathlib import Path as FilePath

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, CorruptDataError, InvalidRequestError
from tdserve.rules.weights import Publishing as UnfinishedVersion, VersionRecord, check_metadata
from tdserve.server import inline_tasks
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.opened_store import OpenedStore
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.specs import message_of
from tdserve.server.stores import Stores
from tdserve.server.tables.policies import wake_followers
from tdserve.server.weights.checksums import MIN_NBYTES, Checksums
from tdserve.server.weights.relays import Relays
from tdserve.server.weights.unpublished import Unpublished
from tdserve.server.weights.version_files import drop, let_go, path_of, retire_unread
from tdserve.server.workers import DataWorker
from tdserve.store.catalog_db import Transaction
from tdserve.structure import codec
from tdserve.structure.dtypes import NAMES
from tdserve.structure.tree import Spec
from tdserve.structure.version_subset import FLOATING, converted, decode_numbers, encode_numbers, only_leaves
from tdserve.v1 import control_pb2, worker_pb2

MAX_TOLD_SPECS = 64
"""Structures that a session need not tell again: more than clients rely on, since requests may overtake one another."""


class Publishing:
    """What sessions ask of weights stores.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, traffic: Traffic) -> None:
        self._stores = stores
        self._answers = answers
        self._traffic = traffic
        self._checksums = Checksums(stores)
        self._unpublished = Unpublished(stores)
        self.relays = Relays(traffic)

    def restore(self) -> None:
        """Removes, after a restart, what was to become the first version of some weights. To be called on the event
        loop, before anybody may ask."""
        self._unpublished.restore()

    async def publish(
        self, session: ClientSession, request: int, asked: control_pb2.PublishRequest
    ) -> control_pb2.Done:
        """Stores the next version of some weights; the first makes their store, which is seen from then on.

        Raises:
            CapacityError: The disk is full. The version before stays the newest; without one there is no store.
            InvalidRequestError: Its metadata are too long. The same.
            PeerLostError: The publisher or its worker went away. The same.
            StoreNotFoundError: The store was deleted meanwhile.
        """
        check_metadata(asked.metadata)
        spec = self._spec(session, asked)
        entry = await self._unpublished.store(asked.store, spec, Deadline.after(asked.timeout_s))
        versions = entry.weight_versions()
        order = self._stores.specs.learn(spec)
        publishing = versions.begin(fingerprint=spec.fingerprint, order=order)
        try:
            drop(entry, publishing.drops)
            if session.local is not None:
                await self._let_write(session.local, request, entry, publishing)
            else:
                await session.worker.order(self._receiving(session, request, entry, publishing, spec, asked))
            entry.check_present()
            self._traffic.received(session.transport, asked.content)
            if (answered := self._answers.earlier(session.client_id, request)) is not None:
                self._give_up(session, request, entry, publishing)  # it was tried over another session
                return control_pb2.Done.FromString(answered)
            kept = {record.version for record in versions.kept}
            done = control_pb2.Done(version=publishing.version)
            answer = done.SerializeToString()
            # Nobody sees what is done to the versions before it is on record; if that fails, it never was.
            with versions.undoing(), self._answers.transaction(session.client_id, request, answer) as txn:
                drops = self._commit(entry, publishing, spec, asked, txn)
        except BaseException as error:
            self._give_up(session, request, entry, publishing)
            if isinstance(error, (CorruptDataError, ClosedError)):
                entry.check_present()  # its files went with it
            raise
        for version in kept - {record.version for record in versions.kept}:
            retire_unread(entry, version)
        drop(entry, drops)
        if versions.newest is not None and versions.newest.version == publishing.version:
            entry.spec = spec
        entry.changed.wake()
        self.relays.published(entry)
        wake_followers(self._stores, entry.name)
        self._make_checksums(entry, session.worker)
        return done

    def _commit(
        self,
        entry: OpenedStore,
        publishing: UnfinishedVersion,
        spec: Spec,
        asked: control_pb2.PublishRequest,
        txn: Transaction,
    ) -> tuple[int, ...]:
        """Makes a version the newest, as part of a transaction; returns versions whose files can go."""
        versions = entry.weight_versions()
        dropped = versions.set_keep(asked.keep) if asked.keep else ()
        versions.fanout = asked.fanout or versions.fanout
        drops = versions.commit(publishing, time.time(), nbytes=spec.nbytes, metadata=asked.metadata)
        self._stores.save_state(entry, txn, versions.state())
        self._unpublished.show(entry, txn)
        return dropped + drops

    async def latest(
        self, session: ClientSession, request: int, asked: control_pb2.LatestRequest
    ) -> control_pb2.Done | None:
        """Sends the newest version, waited for if need be, or a certain one. None: the content follows over the
        channel.

        Raises:
            InvalidRequestError: The version that is wanted is not kept.
        """
        deadline = Deadline.after(asked.timeout_s)
        if deadline.timeout_s == 0 and asked.HasField("newer_than") and self._nothing_newer(asked):
            return control_pb2.Done(nothing_newer=True)
        await inline_tasks.in_task()
        with session.waiting():
            entry = await self._stores.wait(asked.store, deadline)
        versions = entry.weight_versions()
        newer_than = asked.newer_than if asked.HasField("newer_than") else 0

        def look() -> VersionRecord | None:
            newest = versions.newest
            return newest if newest is not None and newest.version > newer_than else None

        if asked.HasField("version"):
            version = versions.get(asked.version)
        else:
            found = await session.wait(
                entry.changed, look, deadline, lambda: f"a version of {entry.name!r} newer than {newer_than}"
            )
            version = versions.newest or found  # it may have been retired before this task went on
        if session.local is not None:
            return self._let_read(session, entry, version, asked)
        versions.acquire(version.version)
        try:
            return await self._send(session, request, entry, version, asked, deadline)
        finally:
            let_go(entry, version.version)

    async def _send(
        self,
        session: ClientSession,
        request: int,
        entry: OpenedStore,
        version: VersionRecord,
        asked: control_pb2.LatestRequest,
        deadline: Deadline,
    ) -> control_pb2.Done | None:
        """Has a version sent, or what of it the client wants or needs."""
        spec = self._stores.specs.get(version.fingerprint, version.order)
        accepted = self._make_accepted(entry, version, spec, asked)
        sent = converted(spec, _dtype(asked))
        numbers = decode_numbers(asked.leaves, spec) if asked.HasField("leaves") else None
        if asked.holds and sent is spec and numbers is None and spec.nbytes >= MIN_NBYTES:
            unchanged = await self._checksums.unchanged(entry, asked.holds, version, spec, deadline)
            if unchanged is not None:
                accepted.unchanged, accepted.checksums = unchanged.numbers, unchanged.checksums
                numbers = unchanged.rest
        if numbers is not None:
            sent = only_leaves(sent, numbers)
        is_inline = sent.nbytes <= session.inline_limit(request)
        placed = None
        if numbers is None and not is_inline:
            placed = await self.relays.place(session, entry, version, sent, asked, deadline)
        if placed is not None:
            accepted.link, accepted.is_relayed, accepted.keeps = placed.link, bool(placed.relay), placed.keeps
            accepted.link_secret = placed.secret
        if accepted.is_relayed:
            return control_pb2.Done(accepted=accepted)
        order = session.order(request, is_accepted=not is_inline and not spec.values)
        order.send_version.version.CopyFrom(self._ref(entry, version.version, spec, session.worker))
        order.send_version.inline = is_inline
        order.send_version.dtype = asked.dtype
        if numbers is not None:
            order.send_version.leaves = encode_numbers(numbers)
        with self.relays.sending(entry, placed):
            done = await self._traffic.read(session, request, order, accepted, announces=order.is_accepted)
        if spec.nbytes >= MIN_NBYTES:
            entry.weight_versions().wants_checksums = True
            self._make_checksums(entry, session.worker)
        return done

    def _make_checksums(self, entry: OpenedStore, worker: DataWorker) -> None:
        """Of the newest version, where readers come who could use them: those on this machine copy memory."""
        versions = entry.weight_versions()
        newest = versions.newest
        if newest is None or not versions.wants_checksums or newest.nbytes < MIN_NBYTES:
            return
        spec = self._stores.specs.get(newest.fingerprint)
        self._checksums.make(entry, newest, lambda: self._ref(entry, newest.version, spec, worker), worker)

    def _make_accepted(
        self, entry: OpenedStore, version: VersionRecord, spec: Spec, asked: control_pb2.LatestRequest
    ) -> control_pb2.Accepted:
        accepted = control_pb2.Accepted(
            fingerprint=version.fingerprint,
            version=version.version,
            metadata=version.metadata,
            created_s=version.created_s,
        )
        if asked.fingerprint != version.fingerprint or entry.weight_versions().mixes_orders:
            accepted.spec.CopyFrom(message_of(spec))
        return accepted

    def _receiving(
        self,
        session: ClientSession,
        request: int,
        entry: OpenedStore,
        publishing: UnfinishedVersion,
        spec: Spec,
        asked: control_pb2.PublishRequest,
    ) -> worker_pb2.Order:
        order = session.order(request, is_accepted=bool(asked.content.message_nbytes))
        body = order.receive_version
        body.version.CopyFrom(self._ref(entry, publishing.version, spec, session.worker))
        if publishing.recycles is not None:
            body.version.recycles = str(path_of(entry, publishing.recycles))
        body.content.CopyFrom(asked.content)
        return order

    async def _let_write(
        self, local: LocalClient, request: int, entry: OpenedStore, publishing: UnfinishedVersion
    ) -> None:
        """Lets a local client make the version's file. One that is cut short is unlinked, whoever still fills it."""
        local.check_writes(f"publishing {entry.name!r}")
        with self._stores.db.transaction() as txn:  # a stopped one may still name its file so after a restart
            self._stores.save_state(entry, txn, entry.weight_versions().state())
        accepted = control_pb2.Accepted(uid=entry.record.uid, version=publishing.version)
        accepted.path = self._below_root(path_of(entry, publishing.version))
        if publishing.recycles is not None:
            accepted.recycles = self._below_root(path_of(entry, publishing.recycles))
        await local.written(request, accepted)

    def _let_read(
        self, session: ClientSession, entry: OpenedStore, version: VersionRecord, asked: control_pb2.LatestRequest
    ) -> control_pb2.Done:
        """Tells a local client which file to open; it asks again when that was retired before it has."""
        spec = self._stores.specs.get(version.fingerprint, version.order)
        accepted = self._make_accepted(entry, version, spec, asked)
        accepted.uid = entry.record.uid
        accepted.path = self._below_root(path_of(entry, version.version))
        self._traffic.sent(session.transport, 0)
        return control_pb2.Done(accepted=accepted)

    def _below_root(self, path: FilePath) -> str:
        return str(path.relative_to(self._stores.root.path))

    def _nothing_newer(self, asked: control_pb2.LatestRequest) -> bool:
        entry = self._stores.find(asked.store)
        newest = entry.weight_versions().newest if entry is not None else None
        return newest is None or newest.version <= asked.newer_than

    def _spec(self, session: ClientSession, asked: control_pb2.PublishRequest) -> Spec:
        """The structure that came along, or the last with this fingerprint that the session has told."""
        specs, told_specs = self._stores.specs, session.told_specs
        if asked.HasField("spec"):
            told = codec.decode(asked.spec)
            told_specs.pop(told.fingerprint, None)
            told_specs[told.fingerprint] = specs.get(told.fingerprint, specs.learn(told))  # one object for all sessions
            while len(told_specs) > MAX_TOLD_SPECS:
                del told_specs[next(iter(told_specs))]
        fingerprint = asked.content.fingerprint
        spec = told_specs.get(fingerprint)
        return specs.get(fingerprint) if spec is None else spec

    def _give_up(self, session: ClientSession, request: int, entry: OpenedStore, publishing: UnfinishedVersion) -> None:
        """Nothing of a publish stays that has failed; of the first, not even the name."""
        local = session.local
        writer = local.lock_name if local is not None and local.may_still_write(request) else ""
        drops = entry.weight_versions().abort(publishing)
        try:
            drop(entry, drops)
        finally:
            self._unpublished.give_up(entry, writer)

    def _ref(self, entry: OpenedStore, version: int, spec: Spec, worker: DataWorker) -> worker_pb2.VersionRef:
        ref = worker_pb2.VersionRef(path=str(path_of(entry, version)), fingerprint=spec.fingerprint)
        if worker.known_specs.must_tell(spec):
            ref.spec.CopyFrom(message_of(spec))
        return ref


def _dtype(asked: control_pb2.LatestRequest) -> str:
    """What leaves of floating-point numbers are converted to; "" leaves them. Raises InvalidRequestError."""
    name = NAMES.get(asked.dtype, "")
    if asked.dtype and name not in FLOATING:
        raise InvalidRequestError(argument="dtype", reason=f"it is none of {', '.join(FLOATING)}")
    return name
