"""Versions of weights on their way to clients in other places: whole or in part, from here or from another client."""

from __future__ import annotations

from tdserve.base.errors import InvalidRequestError
from tdserve.server.opened_store import OpenedStore
from tdserve.server.sessions.mover import VersionToSend
from tdserve.server.sessions.session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.specs import message_of
from tdserve.server.stores import Stores
from tdserve.server.weights.checksums import MIN_NBYTES, Checksums
from tdserve.server.weights.relays import Relays
from tdserve.server.weights.version_files import path_of
from tdserve.server.workers import DataWorker
from tdserve.structure.dtypes import NAMES
from tdserve.structure.tree import Spec
from tdserve.structure.version_subset import FLOATING, convert_floats, decode_numbers, encode_numbers, only_leaves
from tdserve.v1 import control_pb2, worker_pb2


class VersionSender:
    """Has versions sent.

    Args:
        stores: The book.
        traffic: Counts what is sent.

    Attributes:
        relays: What clients pass on to others.
    """

    def __init__(self, stores: Stores, *, traffic: Traffic) -> None:
        self.relays = Relays(traffic)
        self._stores = stores
        self._traffic = traffic
        self._checksums = Checksums(stores)

    async def send(self, session: ClientSession, request: int, wanted: VersionToSend) -> control_pb2.Done | None:
        """Has a session's worker send a version, or what of it the client wants or needs, unless another client does.

        Returns:
            The answer; None when the client has it already, and the content follows over the channel.
        """
        entry, version, asked = wanted.entry, wanted.record, wanted.asked
        spec = self._stores.specs.get(version.fingerprint, version.order)
        accepted = make_accepted(wanted, spec)
        sent = convert_floats(spec, _dtype(asked))
        numbers = decode_numbers(asked.leaves, spec) if asked.HasField("leaves") else None
        if asked.holds and sent is spec and numbers is None and spec.nbytes >= MIN_NBYTES:
            unchanged = await self._checksums.find_unchanged(entry, asked.holds, version, spec, wanted.deadline)
            if unchanged is not None:
                accepted.unchanged, accepted.checksums = unchanged.numbers, unchanged.checksums
                numbers = unchanged.rest
        if numbers is not None:
            sent = only_leaves(sent, numbers)
        is_inline = sent.nbytes <= session.inline_limit(request)
        placed = None
        if numbers is None and not is_inline:
            placed = await self.relays.place(session, entry, version, sent, asked, wanted.deadline)
        if placed is not None:
            accepted.link, accepted.is_relayed, accepted.keeps = placed.link, bool(placed.relay), placed.keeps
            accepted.link_secret = placed.secret
        if accepted.is_relayed:
            return control_pb2.Done(accepted=accepted)
        order = session.order(request, is_accepted=not is_inline and not spec.values)
        order.send_version.version.CopyFrom(version_ref(entry, version.version, spec, session.worker))
        order.send_version.inline = is_inline
        order.send_version.dtype = asked.dtype
        if numbers is not None:
            order.send_version.leaves = encode_numbers(numbers)
        with self.relays.sending(entry, placed):
            done = await self._traffic.read(session, request, order, accepted, announces=order.is_accepted)
        if spec.nbytes >= MIN_NBYTES:
            entry.weight_versions().wants_checksums = True
            self.make_checksums(entry, session.worker)
        return done

    def make_checksums(self, entry: OpenedStore, worker: DataWorker) -> None:
        """Of the newest version, where readers come who could use them: those on this machine copy memory."""
        versions = entry.weight_versions()
        newest = versions.newest
        if newest is None or not versions.wants_checksums or newest.nbytes < MIN_NBYTES:
            return
        spec = self._stores.specs.get(newest.fingerprint)
        self._checksums.make(entry, newest, lambda: version_ref(entry, newest.version, spec, worker), worker)


def make_accepted(wanted: VersionToSend, spec: Spec) -> control_pb2.Accepted:
    """The answer to who asks for a version, but for how it gets its content."""
    version, fingerprint = wanted.record, wanted.record.fingerprint
    accepted = control_pb2.Accepted(fingerprint=fingerprint, version=version.version, metadata=version.metadata)
    accepted.created_s = version.created_s
    if wanted.asked.fingerprint != fingerprint or wanted.entry.weight_versions().mixes_orders:
        accepted.spec.CopyFrom(message_of(spec))
    return accepted


def version_ref(entry: OpenedStore, version: int, spec: Spec, worker: DataWorker) -> worker_pb2.VersionRef:
    """How orders to a worker name a version; the spec goes along the first time that worker meets it."""
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
