"""Checksums of versions, which tell which leaves of a version a reader already has. Data workers compute them once the
version is visible, after all other work."""

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
from tdserve.server.catalog.stores import Stores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.weights.version_files import release_version
from tdserve.store.weights.version_checksums import DTYPE
from tdserve.structure.trees.tree import Spec
from tdserve.structure.trees.version_subset import encode_numbers
from tdserve.v1 import worker_pb2

CHECKSUM_NBYTES = 8

QUIET_S = 0.02
"""A version whose successor comes sooner gets no checksums, unless most of the versions before it stayed unchanged:
they would delay the next publish and help no reader."""

WAIT_S = 0.05
BYTES_PER_S = 1e9
"""A reader waits ``WAIT_S`` and one second per ``BYTES_PER_S`` of a version for its checksums, if the versions before
it were mostly unchanged. A worker computes them five times as fast."""


MakeRef = Callable[[], worker_pb2.VersionRef]


@dataclass(frozen=True)
class Unchanged:
    """Leaves that a reader already has.

    Attributes:
        numbers: Their numbers, as in ``Accepted.unchanged``.
        checksums: Their checksums, as in ``Accepted.checksums``.
        rest: Numbers of the other leaves.
    """

    numbers: bytes
    checksums: bytes
    rest: list[int]


class Checksums:
    """The checksums of all weights stores.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._waiting: dict[str, int] = {}  # newest version of a store, by uid, during QUIET_S
        self._making: dict[str, tuple[int, asyncio.Future[worker_pb2.Worked]]] = {}

    def make(self, store: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker) -> None:
        """Has a worker compute a version's checksums, unless they exist, are being computed, or would hardly be of use.
        A computation for an older version of the store is abandoned.

        Args:
            make_ref: Returns the reference to the version; called when the order is sent, which may be later or never.
        """
        versions = store.get_versions()
        if not versions.is_worth_checksums(version.version):
            return
        if versions.is_mostly_unchanged:
            self._begin(store, version, make_ref, worker)
        elif self._waiting.get(store.record.uid, 0) < version.version:
            self._waiting[store.record.uid] = version.version
            asyncio.get_running_loop().call_later(QUIET_S, self._begin_if_newest, store, version, make_ref, worker)

    async def compute(
        self, store: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker, dtype: int
    ) -> bytes:
        """Has a worker compute the checksums of a version as it is sent, for a client that waits for them.

        Args:
            make_ref: Returns the reference to the version.
            dtype: As in ``LatestRequest``.

        Raises:
            VersionNotFoundError: It is not kept any more.
            TDServeError: Why the worker cannot do it.
        """
        store.get_versions().acquire(version.version)
        try:
            order = worker_pb2.Order()
            order.checksum_version.version.CopyFrom(make_ref())
            order.checksum_version.dtype = dtype  # type: ignore[assignment]
            order.checksum_version.is_awaited = True
            return (await worker.submit(order)).checksums
        finally:
            release_version(store, version.version)

    def _begin_if_newest(
        self, store: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker
    ) -> None:
        uid = store.record.uid
        if self._waiting.get(uid) == version.version:  # else a newer version has replaced it
            del self._waiting[uid]
            if not store.waiters.is_gone:
                self._begin(store, version, make_ref, worker)

    def _begin(self, store: OpenedStore, version: VersionRecord, make_ref: MakeRef, worker: DataWorker) -> None:
        versions, uid = store.get_versions(), store.record.uid
        making = self._making.get(uid)
        if versions.get_checksums(version.version) is not None or (making is not None and making[0] >= version.version):
            return
        order = worker_pb2.Order()
        order.checksum_version.version.CopyFrom(make_ref())
        future = worker.submit(order)
        self._making[uid] = version.version, future
        future.add_done_callback(lambda done: self._take_report(store, version, done))

    async def find_unchanged(
        self, store: OpenedStore, held: int, version: VersionRecord, spec: Spec, deadline: Deadline
    ) -> Unchanged | None:
        """Returns the leaves that version ``held`` has too; None if they are not known or too few to be worth it."""
        versions = store.get_versions()
        before = versions.get_checksums(held)
        if before is None or before.fingerprint != version.fingerprint:
            return None
        making = self._making.get(store.record.uid)
        if versions.is_mostly_unchanged and making is not None and making[0] == version.version:
            await asyncio.wait({making[1]}, timeout=deadline.limit(WAIT_S + spec.nbytes / BYTES_PER_S))
        now = versions.get_checksums(version.version)
        if now is None:
            return None
        checksums = np.frombuffer(now.content, DTYPE)
        is_same = checksums == np.frombuffer(before.content, DTYPE)
        if _sum_nbytes(spec, is_same) < MIN_SHARE * spec.nbytes:
            return None
        rest: list[int] = np.flatnonzero(~is_same).tolist()
        return Unchanged(encode_numbers(np.flatnonzero(is_same)), checksums[is_same].tobytes(), rest)

    def _take_report(self, store: OpenedStore, version: VersionRecord, done: asyncio.Future[worker_pb2.Worked]) -> None:
        uid = store.record.uid
        if self._making.get(uid, (0, None))[1] is done:
            del self._making[uid]
        if done.cancelled() or done.exception() is not None or store.waiters.is_gone:
            return  # readers get the version whole
        content = done.result().checksums
        versions = store.get_versions()
        spec = self._stores.specs.get(version.fingerprint)
        before = versions.find_checksums_before(version.version)
        if len(content) == CHECKSUM_NBYTES * len(spec.tensors) and versions.set_checksums(version.version, content):
            if before is not None and before[1].fingerprint == version.fingerprint:
                is_same = np.frombuffer(content, DTYPE) == np.frombuffer(before[1].content, DTYPE)
                share = _sum_nbytes(spec, is_same) / spec.nbytes
                versions.note_unchanged(version.version, before[0], share=share)
            with suppress(CapacityError), self._stores.db.begin_transaction() as txn:  # a restart computes them again
                self._stores.save_state(store, txn, versions.get_state())
            store.waiters.wake()
        elif not content and spec.tensors:
            versions.note_superseded(version.version)


def _sum_nbytes(spec: Spec, is_meant: NDArray[np.bool_]) -> int:
    """Returns the total size of the leaves in a mask."""
    sizes = np.array([leaf.nbytes for _, leaf in spec.tensors], np.int64)
    return int(sizes[is_meant].sum())
