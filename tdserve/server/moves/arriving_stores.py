"""Stores that come from another server: their files are written to a place that is not read, and become a store in the
end.

From ``complete`` on a record in the catalog keeps what has come, also over a restart, since the other server may have
released the store by now. A client that finds it released has it shown. Each attempt to move a store is a move of its
own: of one that was given up nothing is ever shown. What a client leaves that is killed goes once the client is
forgotten, or with the next restart.

``server/README.md`` has reading orders of checkpoints and moves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tdserve.base.errors import (
    CorruptDataError,
    RemoteProtocolError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
    WrongStateError,
)
from tdserve.base.failpoints import reach
from tdserve.base.ids import check_store_name, check_uid
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.draws.kept_draw import KeptDraw
from tdserve.server.catalog.stores import Stores
from tdserve.server.durability.syncing import Syncing
from tdserve.server.execution.waiting import retrieve_exception
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.placement_kind import find_forward
from tdserve.server.kinds.surviving_rows import rename_for_copy
from tdserve.server.kinds.table_kind import TableKind
from tdserve.server.recovery.draw_records import save_draw
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.store.database.catalog_db import Transaction
from tdserve.store.durability import watermark
from tdserve.store.roots import moved_files
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations, is_of
from tdserve.store.weights import version_marks
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2


class ArrivingStores:
    """The stores that come to a server.

    Args:
        stores: All stores of the server.
        syncing: Syncs them.
    """

    def __init__(self, stores: Stores, syncing: Syncing) -> None:
        self._stores = stores
        self._syncing = syncing
        self._clients: dict[str, bytes] = {}  # who brings what has come, by move
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by move, while a step of it is taken
        self._steps: set[asyncio.Task[None]] = set()

    def restore(self) -> None:
        """Finishes what a restart has interrupted, and removes files that are not all there."""
        root, db = self._stores.root, self._stores.db
        for key, content in db.scan("arriving"):
            moved, move = control_pb2.MovedStore.FromString(content), key.decode()
            record = StoreRecord.from_bytes(moved.record)
            if self._stores.catalog.find_name(record.uid) is None:
                self._clients[move] = moved.client_id
                self._expect(moved, record)
                continue
            if not record.packed and root.arriving_folder(move).exists():
                root.move_to_trash(record.name, move)  # the files of the record of where it was
                root.empty_trash(move)
                root.take_arrived(record.name, move)
            db.delete("arriving", key)
        for folder in root.list_arriving():
            if folder.name not in self._clients:
                moved_files.remove(folder)

    def list_clients(self) -> set[bytes]:
        """Returns the ids of the clients that bring what has come."""
        return set(self._clients.values())

    def list_complete(self) -> list[control_pb2.ArrivedStore]:
        """Returns what is complete and may have been released, with the moves by which it has come."""
        found = [
            (move.decode(), control_pb2.MovedStore.FromString(each)) for move, each in self._stores.db.scan("arriving")
        ]
        return [
            control_pb2.ArrivedStore(store=StoreRecord.from_bytes(moved.record).name, move=move)
            for move, moved in found
            if not moved.is_copy
        ]

    def forget_client(self, client_id: bytes) -> None:
        """Removes, soon, what a client has brought that is gone for good; stores that may have been released stay."""
        for move in [move for move, brings in self._clients.items() if brings == client_id]:
            self._begin_step(move, self._abandon(move))

    async def _take_step(self, move: str, step: Coroutine[None, None, None]) -> None:
        """Takes a step of a move after those before, and to its end: what a thread has begun continues when the request
        is cancelled."""
        await asyncio.shield(self._begin_step(move, step))

    def _begin_step(self, move: str, step: Coroutine[None, None, None]) -> asyncio.Task[None]:
        lock = self._locks.setdefault(move, asyncio.Lock())

        async def take() -> None:
            async with lock:
                await step

        task = asyncio.create_task(take(), name=f"tdserve-move-{move}")
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        task.add_done_callback(retrieve_exception)
        return task

    async def receive(
        self, name: str, move: str, sizes: control_pb2.FileSizes, *, client_id: bytes, continues: bool = False
    ) -> None:
        """Makes the files of a store, or changes them so that there are just these.

        Args:
            client_id: Id of the client that brings it. Once that is forgotten they are removed.
            continues: Whether they have come before, and only what has changed since will be written.

        Raises:
            WrongStateError: What had come before is gone: the server was started again. New files would be zero where
                nothing has changed since.
            StoreExistsError: A store of this server has the name.
            CapacityError: There is no room. Some files may stay, until the move is given up.
            RemoteProtocolError: There is not one size per path.
        """
        self._check_free(name)
        folder = self._stores.root.arriving_folder(move)
        if len(sizes.paths) != len(sizes.nbytes):
            raise RemoteProtocolError(expected=f"{len(sizes.paths)} sizes", received=f"{len(sizes.nbytes)}")
        files = dict(zip(sizes.paths, sizes.nbytes, strict=True))

        async def set_files() -> None:
            if continues and not folder.is_dir():
                raise _make_gone_error(move)
            self._clients[move] = client_id
            await asyncio.to_thread(moved_files.set_files, folder, files)

        await self._take_step(move, set_files())

    def _check_free(self, name: str, uid: str = "") -> None:
        """Raises StoreExistsError if a store of this server has the name; WrongStateError if that is the very one that
        comes, of this incarnation: the mover finds it here when it looks again. With an incarnation, none may be being
        created or come from elsewhere either."""
        known = self._stores.catalog.find(check_store_name(name))
        if known is None and uid:
            self._stores.catalog.check_free(name, uid=uid)
        if known is None or find_forward(known) is not None:
            return
        if known.uid == uid:
            raise WrongStateError(state=f"{name!r} has come by another move", event="going on with this move")
        raise StoreExistsError(name=name)

    async def write(self, move: str, blocks: Sequence[control_pb2.FileBlock]) -> None:
        """Writes blocks into the files of a store.

        Raises:
            WrongStateError: What had come by this move is gone: the server was started again.
            CapacityError: There is no room.
        """
        folder = self._stores.root.arriving_folder(move)
        if not folder.is_dir():
            raise _make_gone_error(move)
        given = [moved_files.Block(each.path, each.offset, len(each.content), content=each.content) for each in blocks]
        await self._take_step(move, asyncio.to_thread(moved_files.write_blocks, folder, given))

    async def sync(self, move: str) -> None:
        """Syncs what has been written, so that ``complete`` has less to do while no request is served."""
        await self._take_step(move, asyncio.to_thread(moved_files.sync_files, self._stores.root.arriving_folder(move)))

    async def complete(self, name: str, move: str, moved: control_pb2.MovedStore) -> None:
        """Keeps a store whose files are all here, until it is shown or comes again.

        Raises:
            WrongStateError: Its files have not come by this move, or are gone: it was given up, or the server was
                started again; or it has come by another move.
            StoreExistsError: Another store of this server has the name.
            CorruptDataError: It is a copy with damaged files.
            RemoteProtocolError: What is on record of it cannot be.
        """
        await self._take_step(move, self._complete(name, move, moved, _check_moved(moved)))

    async def _complete(self, name: str, move: str, moved: control_pb2.MovedStore, record: StoreRecord) -> None:
        folder = self._stores.root.arriving_folder(move)
        if moved.is_copy and folder.is_dir():
            record = await asyncio.to_thread(_begin_copy, folder, record, name, move)
            moved.record = record.to_bytes()
            moved.draws[:] = [_rename_draw(draw, move) for draw in moved.draws]
        if record.name != name or not folder.is_dir():
            raise _make_gone_error(move)
        self._check_free(name, record.uid)
        if KINDS[record.kind].has_versions:
            await asyncio.to_thread(version_marks.adopt_marks, folder / "versions", uid=record.uid)
        await asyncio.to_thread(moved_files.sync_files, folder)
        if not folder.is_dir():  # the store was shown meanwhile
            raise _make_gone_error(move)
        self._check_free(name, record.uid)  # a restart would put these files in the place of those that serve
        moved.client_id = self._clients.get(move, b"")
        self._stores.db.put("arriving", move.encode(), moved.SerializeToString())
        self._expect(moved, record)
        await asyncio.to_thread(self._stores.db.sync)
        reach("move.completed")

    def _expect(self, moved: control_pb2.MovedStore, record: StoreRecord) -> None:
        if not moved.is_copy:  # of which the original stays where it is
            self._stores.catalog.expect(record)

    async def give_up(self, move: str) -> None:
        """Removes what has come by a move that will not be released; nothing if it is a store already.

        Raises:
            InvalidRequestError: It is no id of a move.
        """
        await self._take_step(move, self._remove(move))

    async def _abandon(self, move: str) -> None:
        content = self._stores.db.get("arriving", move.encode())
        if content is None or control_pb2.MovedStore.FromString(content).is_copy:
            await self._remove(move)

    async def _remove(self, move: str) -> None:
        folder, content = self._stores.root.arriving_folder(move), self._stores.db.get("arriving", move.encode())
        self._clients.pop(move, None)
        self._stores.db.delete("arriving", move.encode())
        if content is not None:
            self._forget_coming(_read_record(content))
        await asyncio.to_thread(moved_files.remove, folder)

    def _forget_coming(self, record: StoreRecord) -> None:
        """Gives the name of a store free, unless another move has brought it too."""
        others = (_read_record(content) for _, content in self._stores.db.scan("arriving"))
        if all(other.uid != record.uid for other in others):
            self._stores.catalog.forget_coming(record)

    async def show(self, name: str, move: str) -> None:
        """Makes a store visible that another server has released by this very move.

        Raises:
            InvalidRequestError: It is no id of a move.
            StoreNotFoundError: It has neither come by this move nor is it here.
        """
        await self._take_step(move, self._show_arrived(name, move))
        record = self._stores.catalog.get(name)
        if find_forward(record) is not None:
            raise StoreNotFoundError(name=name)
        if record.durability == "disk":
            await self._syncing.wait_synced(record.uid)
        else:
            self._syncing.sync_soon(record.uid)

    async def _show_arrived(self, name: str, move: str) -> None:
        if (content := self._stores.db.get("arriving", check_store_name(move).encode())) is None:
            return
        self._check_free(name)
        known = self._stores.catalog.find(name)
        for other in self._show(move, control_pb2.MovedStore.FromString(content), known):
            await self._remove(other)
        if known is not None:
            await self._stores.free(known.uid)

    def _show(self, move: str, moved: control_pb2.MovedStore, before: StoreRecord | None) -> list[str]:
        """Makes a store visible in the place of the record of where it was, if there is one; returns other moves that
        have brought it. Not one of them was released: the source names one."""
        record, state = StoreRecord.from_bytes(moved.record), json.loads(moved.state or b"{}")
        specs = [(codec.decode(spec), order) for spec, order in zip(moved.specs, moved.orders, strict=True)]
        for spec, _ in specs:
            self._stores.specs.learn(spec)
        # Once more: learning one may have begun to forget those that no store has yet.
        names = {(spec.fingerprint, order): self._stores.specs.learn(spec) for spec, order in specs}
        if record.fingerprint:
            record = replace(record, order=names[record.fingerprint, record.order])
        state = KINDS[record.kind].rename_orders(state, names) if state else state

        stores = self._stores
        former_version = max(record.former_version, stores.former.find(record.name))  # one may have been deleted here
        record = replace(record, former_version=former_version)
        if before is None:
            stores.catalog.check_free(record.name, uid=record.uid)
        if moved.is_copy:
            state = KINDS[record.kind].begin_copy(stores.root.arriving_folder(move), record, state, stores.db)
        else:
            state = KINDS[record.kind].arrive(state)
        others = [
            other.decode()
            for other, content in stores.db.scan("arriving")
            if other != move.encode() and _read_record(content).uid == record.uid
        ]
        with stores.db.begin_transaction() as txn:
            if before is not None:
                stores.forget_rules(before, txn)
            for other in others:  # so that a restart takes the files of this move
                txn.delete("arriving", other.encode())
            _save(record, state, moved, txn)
        reach("move.recorded")
        if before is not None:
            stores.give_way(before)
        if record.packed:
            moved_files.remove(stores.root.arriving_folder(move))
        else:
            stores.root.take_arrived(record.name, move)  # from now on, also after a restart
        stores.catalog.add(record)
        # Its files are on the disk. What vouches for them is not, nor are there checksums of what the source had not
        # synced: and it may never be opened here.
        stores.opened.add_unsynced([record.name])
        stores.announce(record.name)
        reach("move.shown")
        stores.db.delete("arriving", move.encode())
        self._clients.pop(move, None)
        return others


def _make_gone_error(move: str) -> WrongStateError:
    state = f"nothing has come by move {move} since the server started, or it was given up"
    return WrongStateError(state=state, event="going on with the move")


def _begin_copy(folder: Path, record: StoreRecord, name: str, move: str) -> StoreRecord:
    """Makes the files of a copy those of a store of its own, whose incarnation is that of the move. It is safe to
    repeat."""
    path = folder / GENERATION_FILE
    if path.exists() and not is_of(path, uid=move):
        generations = Generations.open(path, uid=record.uid, writable=True)
        rename = rename_for_copy(move)
        # So that rows are compared with what they were at the source, and damage there is not taken for content.
        watermark.begin_copy(folder, source_uid=record.uid, uid=move, rename=rename)
        generations.values[:] = np.where(generations.values, rename(generations.values), 0)
        generations.begin_copy(move)
    return replace(record, name=name, uid=move, is_restored=record.kind == TableKind.name)


def _rename_draw(record: bytes, move: str) -> bytes:
    """Returns the record of a draw for the rows of a copy."""
    draw = KeptDraw.from_bytes(record)
    rename = rename_for_copy(move)
    draw.rename(lambda rows, row_ids: rename(row_ids))
    return draw.to_bytes()


def _save(record: StoreRecord, state: dict[str, Any], moved: control_pb2.MovedStore, txn: Transaction) -> None:
    """Records a store that has come, and all that is known of it."""
    txn.put("stores", record.name.encode(), record.to_bytes())
    if record.packed:
        txn.put("packed", record.uid.encode(), moved.packed)
    if state:
        txn.put("states", record.uid.encode(), json.dumps(state).encode())
    for number, lost in enumerate(moved.lost):
        Overwrite.from_moved(lost, record.uid, number, record.num_rows).save(txn)
    for draw in moved.draws:
        save_draw(record.uid, KeptDraw.from_bytes(draw), txn)


def _check_moved(moved: control_pb2.MovedStore) -> StoreRecord:
    """Returns the record of a store that another server has, as a client says.

    Raises:
        RemoteProtocolError: A part of what is on record of it is not as a server writes it.
    """
    try:
        record = StoreRecord.from_bytes(moved.record)
        check_uid(record.uid)
        if record.kind not in KINDS or not isinstance(json.loads(moved.state or b"{}"), dict):
            raise CorruptDataError(path="record", expected="a known kind and its state", actual=repr(record.kind)[:80])
        names = {(codec.decode(spec).fingerprint, order) for spec, order in zip(moved.specs, moved.orders, strict=True)}
        if record.fingerprint and (record.fingerprint, record.order) not in names:
            raise CorruptDataError(path="record", expected="the structure that it names", actual=f"{len(names)} others")
        if record.packed and not moved.packed:
            raise CorruptDataError(path="record", expected="the content of a store without files", actual="none")
        for draw in moved.draws:
            KeptDraw.from_bytes(draw)
        for number, lost in enumerate(moved.lost):
            Overwrite.from_moved(lost, record.uid, number, record.num_rows)
    except (TDServeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise RemoteProtocolError(expected="what is on record of a store", received=str(fault)[:200]) from fault
    return record


def _read_record(content: bytes) -> StoreRecord:
    return StoreRecord.from_bytes(control_pb2.MovedStore.FromString(content).record)
