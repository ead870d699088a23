"""Leaves that come to a table later, visible all together or not at all, also after a crash.

Their files, which are zero, are made in a folder of their own. One transaction makes the structure the table's; then
the files are renamed into their places, and the number of the structure in the generation file changes. From that turn
on, requests see the table under its new structure: another ``OpenedStore`` with the same rules. Until then only this
module knows of the new files. So rows that were reserved before, and are filled later under the old structure, have
zeros there like all earlier rows; a request that reserves rows afterwards knows the new leaves, or is refused.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path as FilePath

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.base.failpoints import reach
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.row_files import list_dotted
from tdserve.server.mutations.alteration_folder import RETRY_EVERY_S, hold_alone, make_altering_folder, work_in_folder
from tdserve.server.mutations.damage_checks import DamageChecks
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.restructured import Restructured
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.rows import leaf_folders, restructuring
from tdserve.structure.trees import codec
from tdserve.structure.trees.altering import Alteration
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.values.value_codec import encode_nones

_log = logging.getLogger("tdserve.server")


class AddedLeaves:
    """Adds leaves to the rows of tables for sessions.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        damage_checks: Finds damaged rows.
        values_worker: The worker that writes non-tensor values.
    """

    def __init__(
        self, stores: Stores, answers: CommittedAnswers, damage_checks: DamageChecks, *, values_worker: DataWorker
    ) -> None:
        self._damage_checks = damage_checks
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._finishing: set[asyncio.Task[None]] = set()

    async def add(
        self, session: ClientSession, request: int, store: OpenedStore, wanted: Alteration, deadline: Deadline
    ) -> control_pb2.Done:
        """Adds the leaves of an alteration, whose ``added`` is a part of one row.

        Raises:
            StructureChangedError: One of them exists already. Nothing was changed.
            DamagedRowError: A row is damaged, of a table with ``checksum=True``. Nothing was changed.
            InvalidRequestError, InvalidSpecError, CapacityError, DeadlineExceededError: Nothing was changed.
        """
        if wanted.added is None or wanted != Alteration(added=wanted.added):
            raise InvalidRequestError(argument="alteration", reason=f"table {store.name!r} gets leaves, and keeps them")
        altered = _apply(store, wanted.added)
        added = wanted.added.prepend((store.record.capacity,))
        async with (
            make_altering_folder(self._stores.db, session, store, added) as made,
            hold_alone(session, store, deadline),
        ):
            if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                return answered  # a retry: it was committed over an ended session
            await self._damage_checks.check_all(store)
            restructured = await self._prepare(store, altered, made.folder, added)
            store.check_present()
            order = self._stores.specs.learn(altered.get_row_spec())
            altered.record = record = replace(altered.record, order=order)
            done = control_pb2.Done(version=record.structure)
            with self._answers.begin_transaction(session.client_id, request, done.SerializeToString()) as txn:
                txn.put("stores", store.name.encode(), record.to_bytes())
                txn.delete("packed", record.uid.encode())  # of another structure
                txn.put("pending", restructured.key, restructured.to_bytes())
            reach("leaves.recorded")
            self._stores.catalog.replace(record)
            # The write lock is held to the end: an overwrite on record is of the structure that a restart finds.
            await self._outlast(self._start(store, altered, restructured))
        return done

    async def repair(self, store: OpenedStore, restructured: Restructured) -> None:
        """Finishes, after a restart, what a crash interrupted; in the background if there is no room for it now.

        Args:
            store: The table, opened with its new structure.
        """
        if await _move_files(store, restructured):
            self._show(store, store, restructured)
        else:
            store.is_restructuring = True
            self._start(store, store, restructured)

    def close(self) -> None:
        """Stops retrying; the next start of the server finishes what waits for room."""
        for task in self._finishing:
            task.cancel()

    async def _prepare(self, store: OpenedStore, altered: OpenedStore, folder: FilePath, added: Spec) -> Restructured:
        """Writes all that is needed for the new structure in a place that is not read yet; returns what remains to be
        done."""
        paths = _list_leaves(added)
        origins = {path: None if path in paths else path for path in _list_leaves(altered.spec)}
        change = restructuring.plan_file_change(store.spec, altered.spec, origins, added)
        name, spec = folder.name, altered.spec
        await work_in_folder(store, lambda path: restructuring.keep(path, path / name, change, spec))
        values = [path for path, _ in added.values]
        if values:  # one for all rows
            order = worker_pb2.Order()
            order.put_values.values = encode_nones(len(values))
            order.put_values.keys.extend(content_pb2.Path(parts=path) for path in values)
            order.put_values.spec.CopyFrom(codec.encode(altered.spec))
            await self._worker.order_until_done(store, order)
        return Restructured(store.record.uid, folder.name, change, moved_values=(), cleared_values=())

    def _start(self, store: OpenedStore, altered: OpenedStore, restructured: Restructured) -> asyncio.Task[None]:
        task = asyncio.create_task(self._finish(store, altered, restructured), name=f"tdserve-leaves-{store.name}")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return task

    async def _outlast(self, task: asyncio.Task[None]) -> None:
        """Waits for the last steps, also if the caller is cancelled: it has been decided that they come."""
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise
        if not task.cancelled():
            task.result()

    async def _finish(self, store: OpenedStore, altered: OpenedStore, restructured: Restructured) -> None:
        """Takes the last steps as soon as there is room; meanwhile the table is used under its old structure."""
        while not store.waiters.is_gone:
            if await _move_files(store, restructured):
                self._show(store, altered, restructured)
                return
            await asyncio.sleep(RETRY_EVERY_S)

    def _show(self, store: OpenedStore, altered: OpenedStore, restructured: Restructured) -> None:
        """Lets requests see the table under its new structure, whose files are in their places."""
        generations = store.generations
        if store.waiters.is_gone or generations is None:
            return
        store.get_table().state.take_back_claims()  # each is of one structure; what was claimed is reserved from now on
        generations.move_structure(altered.record.structure)
        if altered is not store:
            self._stores.opened.put(altered)
            store.is_outdated = True
        store.is_restructuring = False
        reach("leaves.shown")
        self._stores.db.delete("pending", restructured.key)
        store.waiters.wake()


async def _move_files(store: OpenedStore, restructured: Restructured) -> bool:
    """Gives the table the files of its new structure; returns False if there is no room for that. It is safe to
    repeat, and does nothing once the table is gone."""
    name, files = restructured.folder, restructured.files
    try:
        await work_in_folder(store, lambda path: restructuring.carry_out(path, path / name, files))
    except TDServeError as error:
        if store.waiters.is_gone:
            return False
        _log.error("table %r waits for its new leaves: %s", store.name, error)
        return False
    return True


def _apply(store: OpenedStore, added: Spec) -> OpenedStore:
    """Returns the table as it will be, with the rules and waiters that it has. Errors as in ``AddedLeaves.add``."""
    row_spec = Alteration(added=added).apply(store.get_row_spec(), store=store.name).spec
    spec = KINDS[store.record.kind].make_stored_spec(store.record, row_spec)
    record = replace(
        store.record,
        fingerprint=row_spec.fingerprint,
        nbytes=spec.nbytes,
        extra=tuple(list_dotted(leaf_folders.find_extra_paths(spec))),
        structure=store.record.structure + 1,
        added_leaves=(*store.record.added_leaves, *_list_leaves(added)),
    )
    return replace(store, record=record, spec=spec, row_spec=row_spec)


def _list_leaves(spec: Spec) -> list[Path]:
    return [path for path, _ in (*spec.tensors, *spec.values)]
