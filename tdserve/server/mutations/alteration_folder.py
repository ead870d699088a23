"""What changes of structure of tables and tensordict stores share: a folder for what is added, and a time without
writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path as FilePath

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, TDServeError
from tdserve.base.ids import make_uid
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import make_values_path
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.server.processes.workers import drop_store
from tdserve.server.recovery.restructured import Restructured
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.disk.held_folder import HeldFolder
from tdserve.store.rows import leaf_folders, restructuring
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import worker_pb2

RETRY_EVERY_S = 1.0
"""Time between two attempts to finish an alteration that found no room."""

MAX_HOLD_S = 2.0
"""Longest time for which new writes wait for an alteration that waits for older writes; then they go first."""


@dataclass(frozen=True)
class AlteringFolder:
    """A folder in which added content is created and filled.

    Attributes:
        uid: Its uid for workers and local clients.
        added: Structure of the content; None if nothing is added.
    """

    uid: str
    folder: FilePath
    added: Spec | None

    @property
    def spool(self) -> str:
        """Path of the file in which its values wait."""
        return make_values_path(str(self.folder / "staged"))

    def make_ref(self, known_specs: WorkerSpecCache) -> worker_pb2.StoreRef:
        """Returns the reference by which orders name this folder."""
        if self.added is None:
            return worker_pb2.StoreRef()
        fingerprint = self.added.fingerprint
        ref = worker_pb2.StoreRef(uid=self.uid, folder=str(self.folder), fingerprint=fingerprint)
        if known_specs.must_include(self.added):
            ref.spec.CopyFrom(codec.encode(self.added))
        return ref


@asynccontextmanager
async def make_altering_folder(
    db: CatalogDB, session: ClientSession, store: OpenedStore, added: Spec | None
) -> AsyncIterator[AlteringFolder]:
    """Runs a block with a folder for added content; the folder is removed afterwards, unless the alteration still
    needs it."""
    uid = make_uid()
    made = AlteringFolder(uid, store.folder / f"{restructuring.PREFIX}{uid}", added)
    try:
        if added is not None:
            await work_in_folder(store, lambda path: _make_files(path / made.folder.name, added, uid))
        yield made
    finally:
        if made.folder.name not in {each.folder for each in Restructured.load(db)}:
            await asyncio.to_thread(remove_files, made.folder, uid)
        if added is not None:
            await drop_store([session.worker], uid)


@asynccontextmanager
async def hold_alone(session: ClientSession, store: OpenedStore, deadline: Deadline) -> AsyncIterator[None]:
    """Runs a block during which nothing in a store is overwritten.

    Raises:
        DeadlineExceededError: Others were still writing.
        StoreNotFoundError, StructureChangedError: The store was deleted, or the table has got leaves meanwhile.
    """
    while True:
        async with store.write_lock:
            store.check_current()
            with suppress(DeadlineExceededError):
                await session.wait_until(
                    store.waiters,
                    lambda: not store.writes,
                    Deadline.after(deadline.limit(MAX_HOLD_S)),
                    lambda: f"the end of writes to {store.name!r}",
                )
            store.check_present()
            if not store.writes:
                yield
                return
        if deadline.expired:
            raise DeadlineExceededError(what=f"the end of other writes to {store.name!r}", timeout_s=deadline.timeout_s)
        await asyncio.sleep(0)


async def work_in_folder(store: OpenedStore, work: Callable[[FilePath], None]) -> None:
    """Has a thread work in the folder of a store, which a deletion does not wait for: it ends where that is moved, and
    the next store of the name has nothing of it.

    Args:
        work: Gets a path of the folder, which is no name to show.

    Raises:
        StoreNotFoundError, StoreMovedError: The store is gone, or is by now.
        TDServeError: As in ``work``.
    """
    store.waiters.check_not_gone()
    held = HeldFolder(store.folder)  # in the same turn: so it is this store's
    try:
        await asyncio.to_thread(lambda: work(held.path))
    except TDServeError:
        store.waiters.check_not_gone()
        raise
    store.waiters.check_not_gone()


def _make_files(folder: FilePath, added: Spec, uid: str) -> None:
    leaf_folders.create(folder, added)
    Generations.create(folder / GENERATION_FILE, uid=uid, num_rows=1).close()


def remove_files(folder: FilePath, uid: str) -> None:
    """Removes the folder of an alteration that is over; local clients that have it mapped see that."""
    if not folder.exists():
        return
    if (folder / GENERATION_FILE).exists():
        generations = Generations.open(folder / GENERATION_FILE, uid=uid, writable=True)
        generations.mark_deleted()
        generations.close()
    restructuring.remove(folder)
