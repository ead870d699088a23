"""Which leaves of a version a reader need not be sent: made out by checksums, which data workers make behind everything
else, once the version is visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError
from tdserve.rules.weights import MIN_SHARE, VersionRecord
from tdserve.server.opened_store import OpenedStore
from tdserve.server.stores import Stores
from tdserve.server.workers import DataWorker
from tdserve.store.version_checksums import DTYPE
from tdserve.structure.tree import Spec
from tdserve.structure.version_subset import encode_numbers
from tdserve.v1 import worker_pb2

MIN_NBYTES = 1024 * 1024
"""A smaller version travels whole in less time than it takes to look which of its leaves the reader has."""

CHECKSUM_NBYTES = 8

QUIET_S = 0.02
"""A version that has a successor sooner gets none, unless most of the versions before it was unchanged: to begin with
them takes from the next publish what it saves no reader."""

WAIT_S = 0.05
BYTES_PER_S = 1e9
"""How long a reader waits for the checksums of a version most of which, by the look of those before, it has: a worker
makes them five times as fast."""


MakeRef = Callable[[], worker_pb2.VersionRef]


@dataclass(frozen=True)
class Unchanged:
    """Leaves that a reader has already.

    Attributes:
        numbers: As ``Accepted.unchanged``.
        checksums: As ``Accepted.checksums``.
        rest: Numbers of the other leaves.
    """

    numbers: bytes
    checksums: bytes
    rest: list[int]


class Checksums:
    """The checksums of all weights stores.

    Args:
        stores: The book.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._waiting: dict[str, int] = {}  # the newest version of a store, for a while
        self._making: dict[str, tuple[int, asyncio.Future[worker_pb2.Worked]]] = {}

    def make(self, entry: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker) -> None:
        """Has a worker begin with a version's, unless somebody does, or has, or they are hardly of use; those of an
        older one are given up.

        Args:
            make_ref: Names the version to the worker; called when that is told of it, which may be later, or never.
        """
        versions = entry.weight_versions()
        if not versions.is_worth_checksums(version.version):
            return
        if versions.is_mostly_unchanged:
            self._begin(entry, version, make_ref, worker)
        elif self._waiting.get(entry.record.uid, 0) < version.version:
            self._waiting[entry.record.uid] = version.version
            asyncio.get_running_loop().call_later(QUIET_S, self._begin_if_newest, entry, version, make_ref, worker)

    def _begin_if_newest(
        self, entry: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker
    ) -> None:
        uid = entry.record.uid
        if self._waiting.get(uid) == version.version:  # else there is a newer one
            del self._waiting[uid]
            if not entry.changed.is_deleted:
                self._begin(entry, version, make_ref, worker)

    def _begin(self, entry: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker) -> None:
        versions, uid = entry.weight_versions(), entry.record.uid
        making = self._making.get(uid)
        if versions.checksums(version.version) is not None or (making is not None and making[0] >= version.version):
            return
        order = worker_pb2.Order()
        order.checksum_version.version.CopyFrom(make_ref())
        future = worker.order(order)
        self._making[uid] = version.version, future
        future.add_done_callback(lambda done: self._take_report(entry, version, done))

    async def find_unchanged(
        self, entry: OpenedStore, held: int, version: VersionRecord, spec: Spec, deadline: Deadline
    ) -> Unchanged | None:
        """The leaves that version ``held`` has too; None when that is not known, or not worth while."""
        versions = entry.weight_versions()
        before = versions.checksums(held)
        if before is None or before.fingerprint != version.fingerprint:
            return None
        making = self._making.get(entry.record.uid)
        if versions.is_mostly_unchanged and making is not None and making[0] == version.version:
            remaining_s = deadline.remaining_s
            wait_s = WAIT_S + spec.nbytes / BYTES_PER_S
            await asyncio.wait({making[1]}, timeout=wait_s if remaining_s is None else min(wait_s, remaining_s))
        now = versions.checksums(version.version)
        if now is None:
            return None
        checksums = np.frombuffer(now.content, DTYPE)
        is_same = checksums == np.frombuffer(before.content, DTYPE)
        if _nbytes(spec, is_same) < MIN_SHARE * spec.nbytes:
            return None
        rest: list[int] = np.flatnonzero(~is_same).tolist()
        return Unchanged(encode_numbers(np.flatnonzero(is_same)), checksums[is_same].tobytes(), rest)

    def _take_report(self, entry: OpenedStore, version: VersionRecord, done: asyncio.Future[worker_pb2.Worked]) -> None:
        uid = entry.record.uid
        if self._making.get(uid, (0, None))[1] is done:
            del self._making[uid]
        if done.cancelled() or done.exception() is not None or entry.changed.is_deleted:
            return  # whoever asks for the version gets it whole
        content = done.result().checksums
        versions = entry.weight_versions()
        spec = self._stores.specs.get(version.fingerprint)
        before = versions.checksums_before(version.version)
        if len(content) == CHECKSUM_NBYTES * len(spec.tensors) and versions.set_checksums(version.version, content):
            if before is not None and before[1].fingerprint == version.fingerprint:
                is_same = np.frombuffer(content, DTYPE) == np.frombuffer(before[1].content, DTYPE)
                share = _nbytes(spec, is_same) / spec.nbytes
                versions.note_unchanged(version.version, before[0], share=share)
            with suppress(CapacityError), self._stores.db.transaction() as txn:  # after a restart they are made again
                self._stores.save_state(entry, txn, versions.state())
            entry.changed.wake()
        elif not content and spec.tensors:
            versions.note_superseded(version.version)


def _nbytes(spec: Spec, is_meant: NDArray[np.bool_]) -> int:
    """Of some of the leaves."""
    sizes = np.array([leaf.nbytes for _, leaf in spec.tensors], np.int64)
    return int(sizes[is_meant].sum())
