"""Sends versions of weights to remote clients: whole or in part, from the server or through another client."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.weights import MIN_COMPARED_BYTES, VersionRecord
from tdserve.server.catalog.stores import Stores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import get_message
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import VersionToSend
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.weights.checksums import Checksums
from tdserve.server.weights.relays import Relays
from tdserve.server.weights.small_versions import SmallVersions
from tdserve.server.weights.version_files import make_path
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import NAMES
from tdserve.structure.trees.tree import Spec
from tdserve.structure.trees.version_subset import (
    FLOATING,
    convert_floats,
    decode_numbers,
    encode_numbers,
    select_leaves,
)
from tdserve.v1 import control_pb2, worker_pb2


class VersionSender:
    """Has versions sent by workers or relays.

    Args:
        stores: All stores of the server.
        traffic: Counts transfers.

    Attributes:
        relays: The clients that pass versions on.
    """

    def __init__(self, stores: Stores, *, traffic: Traffic) -> None:
        self.relays = Relays(traffic)
        self._stores = stores
        self._traffic = traffic
        self._checksums = Checksums(stores)
        self._small = SmallVersions()

    async def send(self, session: ClientSession, request: int, wanted: VersionToSend) -> control_pb2.Done | None:
        """Has the session's worker send a version, or the leaves that the client asks for or lacks; or a relay, the
        version. Sends a small version itself if a reader has had it before.

        Returns:
            The answer; None when the client has it already, and the content follows over the channel.
        """
        store, version, asked = wanted.store, wanted.record, wanted.asked
        spec = self._stores.specs.get(version.fingerprint, version.order)
        accepted = make_accepted(wanted, spec)
        sent = convert_floats(spec, _get_dtype(asked))
        numbers, has_values = _choose_sent(asked, version, spec)
        if asked.holds and sent is spec and numbers is None and spec.nbytes >= MIN_COMPARED_BYTES:
            unchanged = await self._checksums.find_unchanged(store, asked.holds, version, spec, wanted.deadline)
            if unchanged is not None:
                accepted.unchanged, accepted.checksums = unchanged.numbers, unchanged.checksums
                numbers = unchanged.rest
        if numbers is not None:
            sent = select_leaves(sent, numbers)
        is_inline = sent.nbytes <= session.compute_inline_limit(request)
        key = store.record.uid, version.version, int(asked.dtype)
        is_small = is_inline and numbers is None and has_values == bool(spec.values)
        if is_small and (kept := self._small.find(key)) is not None:
            return self._traffic.make_inline(accepted, *kept)
        placed = None
        if numbers is None and not is_inline:

            def make_checksums() -> Awaitable[bytes]:
                path = make_path(store, version.version)
                return self._checksums.compute(
                    store, version, lambda: make_version_ref(path, spec, session.worker), session.worker, asked.dtype
                )

            placed = await self.relays.place(session, store, version, sent, asked, wanted.deadline, make_checksums)
        if placed is not None:
            accepted.hop, accepted.is_relayed, accepted.keeps = placed.hop, bool(placed.relay), placed.keeps
            accepted.hop_secret = placed.secret
        if accepted.is_relayed:
            return control_pb2.Done(accepted=accepted)
        order = session.make_order(request, is_accepted=not is_inline and not has_values)
        order.send_version.version.CopyFrom(make_version_ref(make_path(store, version.version), spec, session.worker))
        order.send_version.version.uid = store.record.uid
        order.send_version.inline = is_inline
        order.send_version.dtype = asked.dtype
        order.send_version.without_values = not has_values
        order.send_version.sends_values = session.hello.takes_values
        if numbers is not None:
            order.send_version.leaves = encode_numbers(numbers)
        with self.relays.track_sending(store, placed):
            done = await self._traffic.read(session, request, order, accepted, announces=order.is_accepted)
        if is_small and done is not None:
            self._small.keep(key, done)
        if spec.nbytes >= MIN_COMPARED_BYTES:
            store.get_versions().wants_checksums = True
            self.make_checksums(store, session.worker)
        return done

    def make_checksums(self, store: OpenedStore, worker: DataWorker) -> None:
        """Has a worker compute checksums of the newest version if remote readers can use them; local readers copy
        memory."""
        versions = store.get_versions()
        newest = versions.newest
        if newest is None or not versions.wants_checksums or newest.nbytes < MIN_COMPARED_BYTES:
            return
        spec = self._stores.specs.get(newest.fingerprint)
        path = make_path(store, newest.version)
        self._checksums.make(store, newest, lambda: make_version_ref(path, spec, worker), worker)


def make_accepted(wanted: VersionToSend, spec: Spec) -> control_pb2.Accepted:
    """Returns the answer to a request for a version, without the way in which the content comes."""
    version, fingerprint = wanted.record, wanted.record.fingerprint
    accepted = control_pb2.Accepted(fingerprint=fingerprint, version=version.version, metadata=version.metadata)
    accepted.created_s = version.created_s
    if wanted.asked.fingerprint != fingerprint or wanted.asked.order != codec.compute_order(spec):
        accepted.spec.CopyFrom(get_message(spec))
    return accepted


def make_version_ref(path: Path, spec: Spec, worker: DataWorker) -> worker_pb2.VersionRef:
    """Returns the reference to a version for orders to a worker; contains the spec the first time that the worker meets
    it."""
    ref = worker_pb2.VersionRef(path=str(path), fingerprint=spec.fingerprint)
    if worker.known_specs.must_include(spec):
        ref.spec.CopyFrom(get_message(spec))
    return ref


def _choose_sent(asked: control_pb2.LatestRequest, version: VersionRecord, spec: Spec) -> tuple[list[int] | None, bool]:
    """Returns the numbers of the leaves that a client asks for, None for all, and whether it asks for values."""
    has_values = bool(spec.values) and not asked.without_values
    if not asked.HasField("leaves"):
        return None, has_values
    if asked.fingerprint != version.fingerprint:  # numbers of another structure mean nothing
        return [], False
    return decode_numbers(asked.leaves, spec), has_values


def _get_dtype(asked: control_pb2.LatestRequest) -> str:
    """Returns the dtype to which floating-point leaves are converted; "" for none.

    Raises:
        InvalidRequestError: The dtype is not a floating-point dtype.
    """
    name = NAMES.get(asked.dtype, "")
    if asked.dtype and name not in FLOATING:
        raise InvalidRequestError(argument="dtype", reason=f"it must be one of {', '.join(FLOATING)}")
    return name
