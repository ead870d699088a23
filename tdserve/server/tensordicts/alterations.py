"""Changes of the keys of a tensordict store, visible whole or not at all, also after a crash.

New content is first created and filled in a folder of its own, as a small store that no client sees. Then, while there
are no writes, one transaction makes the new structure the store's. Files and values are renamed into their places after
it, and again after a crash. Readers see the structure number in the generation file change before any file does. What
they have mapped stays valid; a read that was interrupted is repeated.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import replace

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    NotSupportedError,
    SpecMismatchError,
    TDServeError,
)
from tdserve.base.failpoints import reach
from tdserve.messages.row_sets import RowSet
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.mutations.alteration_folder import (
    RETRY_EVERY_S,
    AlteringFolder,
    hold_alone,
    make_altering_folder,
    remove_files,
    work_in_folder,
)
from tdserve.server.mutations.damage_checks import DamageChecks
from tdserve.server.mutations.row_write_hold import RowWriteHold
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.restructured import Restructured
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import StoreToFill
from tdserve.server.tables.added_leaves import AddedLeaves
from tdserve.store.rows import leaf_folders, restructuring
from tdserve.store.values import object_folders
from tdserve.structure.trees import codec
from tdserve.structure.trees.altering import Alteration, Altered, Renaming
from tdserve.structure.trees.tree import Path
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

_log = logging.getLogger("tdserve.server")

MOVING = -1
"""Takes the place of the structure number while the store's files cannot be opened."""


class Alterations:
    """Changes the structure of tensordict stores and tables for sessions.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        values_worker: The worker that writes non-tensor values.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, values_worker: DataWorker) -> None:
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._damage_checks = DamageChecks(values_worker)
        self._added_leaves = AddedLeaves(stores, answers, self._damage_checks, values_worker=values_worker)
        self._retrying: set[asyncio.Task[None]] = set()

    async def alter(self, session: ClientSession, request: int, asked: control_pb2.AlterRequest) -> control_pb2.Done:
        """Changes a store's structure, whole or not at all. Tables only get leaves.

        Raises:
            TDServeError: Nothing was changed.
        """
        store = self._stores.get(asked.store)
        store.check_kind(asked.kind)
        wanted = _decode(asked)
        if store.table is not None:
            if asked.HasField("content"):
                reason = f"leaves come to table {store.name!r} without content: they are zero in its rows"
                raise InvalidRequestError(argument="content", reason=reason)
            return await self._added_leaves.add(session, request, store, wanted, Deadline.after(asked.timeout_s))
        if KINDS[store.record.kind].has_rules:
            raise store.make_kind_error("tensordict")
        store.check_writable()
        if store.record.adopted and wanted.is_locked is None:
            reason = f"its tensors lie in {store.record.adopted}; change that folder, and adopt it again"
            raise NotSupportedError(feature=f"another structure of adopted store {store.name!r}", reason=reason)
        wanted.apply(store.spec, store=store.name)  # checked before anything is created
        _check_content(store, wanted, asked)
        deadline = Deadline.after(asked.timeout_s)
        async with make_altering_folder(self._stores.db, session, store, wanted.added) as made:
            if asked.HasField("content"):
                path = str(made.folder.relative_to(self._stores.root.path))
                target = StoreToFill(store.name, made.uid, made.make_ref, made.spool, path)
                await session.movers.writes.fill(request, target, asked.content)
            reach("alteration.received")
            async with hold_alone(session, store, deadline):
                answered = self._answers.find_earlier(session.client_id, request)
                if answered is not None:  # a retry: it was committed over a session that has ended
                    return answered
                altered = wanted.apply(store.spec, store=store.name)
                if wanted.is_locked is None:
                    await self._damage_checks.check_all(store)
                return await self._commit(session, request, store, altered, made, asked)

    async def repair(self) -> int:
        """Finishes, after a restart, the alterations that a crash interrupted and removes those that were not
        committed.

        Returns:
            How many committed alterations were unfinished.
        """
        found = Restructured.load(self._stores.db)
        for restructured in found:
            try:
                store = self._stores.find_uid(restructured.uid)
                if store is None:
                    self._stores.db.delete("pending", restructured.key)
                elif store.table is not None:
                    await self._added_leaves.repair(store, restructured)
                else:
                    await self._finish_or_retry(store, restructured)
            except TDServeError as error:
                _log.error("a change of structure that a crash had cut short cannot be completed: %s", error)
        waiting = {restructured.folder for restructured in Restructured.load(self._stores.db)}
        for record in self._stores.catalog:
            if record.packed:
                continue
            for folder in restructuring.list_leftovers(self._stores.root.store_folder(record.name)):
                if folder.name not in waiting:
                    store = self._stores.find(record.name)
                    if store is not None:
                        await self._forget_values(store, folder.name)
                    restructuring.remove(folder)
        return len(found)

    def close(self) -> None:
        """Stops retrying; the next start of the server finishes what waits for room."""
        self._added_leaves.close()
        for task in self._retrying:
            task.cancel()

    async def _commit(
        self,
        session: ClientSession,
        request: int,
        store: OpenedStore,
        altered: Altered,
        made: AlteringFolder,
        asked: control_pb2.AlterRequest,
    ) -> control_pb2.Done:
        new, name = altered.spec, made.folder.name
        done = control_pb2.Done(version=store.content_version + 1)
        restructured = Restructured.from_change(store.record.uid, name, store.spec, new, altered.origins, made.added)
        await work_in_folder(store, lambda path: restructuring.keep(path, path / name, restructured.files, new))
        try:
            await self._keep_values(session, store, made, restructured, asked.content)
            reach("alteration.prepared")
            store.check_present()
        except TDServeError:
            await self._forget_values(store, name)
            raise
        record = replace(
            store.record,
            fingerprint=new.fingerprint,
            nbytes=new.nbytes,
            extra=tuple(".".join(path) for path in leaf_folders.find_extra_paths(new)),
            structure=store.record.structure + 1,
            order=self._stores.specs.learn(new),
        )
        with self._answers.begin_transaction(session.client_id, request, done.SerializeToString()) as txn:
            txn.put("stores", store.name.encode(), record.to_bytes())
            txn.delete("packed", record.uid.encode())  # of another structure
            txn.put("pending", restructured.key, restructured.to_bytes())
        reach("alteration.recorded")
        store.record, store.spec = record, new
        self._stores.catalog.replace(record)
        await self._finish_or_retry(store, restructured)
        return done

    async def _keep_values(
        self,
        session: ClientSession,
        store: OpenedStore,
        made: AlteringFolder,
        restructured: Restructured,
        content: control_pb2.Content,
    ) -> None:
        """Stores non-tensor values below a key that no reader looks at, before anything changes."""
        if made.added is not None and (content.values or content.values_nbytes or content.spool_nbytes):
            order = worker_pb2.Order()
            body = order.put_values
            body.values = content.values
            session.movers.writes.locate_values(content, body, made.spool)
            body.keys.extend(content_pb2.Path(parts=path) for path, _ in made.added.values)
            body.spec.CopyFrom(codec.encode(made.added))
            body.below = made.folder.name
            await self._worker.order_until_done(store, order)
        if restructured.kept_values:
            await self._worker.order_until_done(store, _make_move_order(restructured.kept_values))

    async def _forget_values(self, store: OpenedStore, waiting: str) -> None:
        """Removes the values that were stored for an alteration that is not committed."""
        if object_folders.has_values(store.folder):
            forgetting = worker_pb2.Order()
            forgetting.move_values.cleared_below = waiting
            with suppress(TDServeError):  # else they take room until the store is deleted
                await self._worker.order_until_done(store, forgetting)

    async def _finish_or_retry(self, store: OpenedStore, restructured: Restructured) -> None:
        """Gives the store the files and values of its structure, while it cannot be read. If that fails, for example
        for lack of space, it is retried in the background: the alteration is decided, so readers wait."""
        generations, values = store.generations, store.get_generation_values()
        if generations is None:
            raise store.make_kind_error("tensordict")
        if generations.structure == store.record.structure and not values[-1] & 1:  # the crash came after the last step
            self._stores.db.delete("pending", restructured.key)
            return
        held = RowWriteHold(store, RowSet.run(0, len(values) - 1), ())
        await held.hide(with_rows=restructured.changes_content)  # else they keep their checksums
        generations.move_structure(MOVING)
        try:
            await self._finish(store, restructured, held)
        except TDServeError as error:
            if store.waiters.is_gone:  # and its files with it
                return
            _log.error("store %r waits for its new structure, and is unreadable meanwhile: %s", store.name, error)
            task = asyncio.create_task(self._retry(store, restructured, held), name=f"tdserve-alteration-{store.name}")
            self._retrying.add(task)
            task.add_done_callback(self._retrying.discard)

    async def _retry(self, store: OpenedStore, restructured: Restructured, held: RowWriteHold) -> None:
        while not store.waiters.is_gone:
            await asyncio.sleep(RETRY_EVERY_S)
            with suppress(TDServeError):
                await self._finish(store, restructured, held)
                _log.warning("store %r has its new structure", store.name)
                uid = restructured.folder.removeprefix(restructuring.PREFIX)
                await asyncio.to_thread(remove_files, store.folder / restructured.folder, uid)
                return

    async def _finish(self, store: OpenedStore, restructured: Restructured, held: RowWriteHold) -> None:
        """Moves files and values into their places, then makes the store readable.

        Raises:
            StoreNotFoundError, StoreMovedError: The store is gone.
            TDServeError: Some could not be moved; it is safe to repeat.
        """
        generations = store.generations
        if generations is None:
            raise store.make_kind_error("tensordict")
        name, files = restructured.folder, restructured.files
        await work_in_folder(store, lambda path: restructuring.carry_out(path, path / name, files))
        reach("alteration.moved")
        generations.move_structure(store.record.structure)
        if restructured.moved_values or restructured.cleared_values:
            await self._worker.order_until_done(
                store, _make_move_order(restructured.moved_values, restructured.cleared_values)
            )
        await held.let_go(is_written=True, is_untouched=not restructured.changes_content)
        reach("alteration.shown")
        self._stores.db.delete("pending", restructured.key)
        store.waiters.wake()


def _decode(asked: control_pb2.AlterRequest) -> Alteration:
    return Alteration(
        removed=tuple(map(_decode_path, asked.removed)),
        renamed=tuple(
            Renaming(_decode_path(each.old_key), _decode_path(each.new_key), each.is_safe) for each in asked.renamed
        ),
        added=codec.decode(asked.added) if asked.HasField("added") else None,
        replaces=frozenset(map(_decode_path, asked.replaces)),
        is_locked=asked.is_locked if asked.HasField("is_locked") else None,
    )


def _check_content(store: OpenedStore, wanted: Alteration, asked: control_pb2.AlterRequest) -> None:
    """Raises SpecMismatchError if content does not fit what is added, or if added values, for which there is no zero,
    come without content."""
    added = wanted.added
    if asked.HasField("content"):
        if added is None or asked.content.fingerprint != added.fingerprint:
            raise SpecMismatchError(
                store=store.name, key="", expected="content of what is added", actual="other content"
            )
    elif added is not None and any(math.prod(leaf.batch_size) for _, leaf in added.values):
        path, _ = added.values[0]
        raise SpecMismatchError(store=store.name, key=".".join(path), expected="its values", actual="none")


def _make_move_order(moves: tuple[tuple[Path, Path], ...], cleared: tuple[Path, ...] = ()) -> worker_pb2.Order:
    order = worker_pb2.Order()
    order.move_values.sources.extend(content_pb2.Path(parts=source) for source, _ in moves)
    order.move_values.targets.extend(content_pb2.Path(parts=target) for _, target in moves)
    order.move_values.cleared.extend(content_pb2.Path(parts=path) for path in cleared)
    return order


def _decode_path(key: content_pb2.Path) -> Path:
    return tuple(key.parts)
