"""Checkpoints: all stores as they are at one moment, kept until a client has read them.

The client has read the files of the stores while they served. Then all of them are brought to rest, and what has
changed since is copied apart; so are the values, from a transaction that was begun at that moment.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    RemoteProtocolError,
    StoreNotFoundError,
    WrongStateError,
)
from tdserve.base.failpoints import reach
from tdserve.base.ids import check_uid
from tdserve.messages.changed_blocks import clear_changed, count_changed_bytes, iter_changed
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.seals import Seal
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.kinds.placement_kind import is_listed
from tdserve.server.moves.file_lists import FileLists
from tdserve.server.moves.leaving_stores import describe_store, read_blocks
from tdserve.server.moves.sealing import Sealing
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import make_keys
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.session_ends import check_open
from tdserve.store.database.catalog_db import PinnedCatalog
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.roots import moved_files
from tdserve.store.values import object_folders
from tdserve.store.values.objects import Objects
from tdserve.store.values.pinned_values import PinnedValues
from tdserve.v1 import control_pb2

MAX_ANSWER_BYTES = 1 << 18
"""Size from which on an answer names no more stores."""

MANY_UNREAD = 16
"""More stores than these that were made during a pass are too many for the moment of a checkpoint."""

MAX_ID = 80
"""Characters of the id of a checkpoint that is reported."""


class _PackedStore(NamedTuple):
    """A store without files, as a checkpoint has it.

    Attributes:
        content: What the catalog has of its content.
        spec: Its structure, as the catalog has it; None if it has none.
    """

    record: StoreRecord
    content: bytes
    spec: bytes | None

    def describe(self) -> control_pb2.FrozenStore:
        """Returns what a client is told of it."""
        moved = control_pb2.MovedStore(record=self.record.to_bytes(), packed=self.content)
        if self.spec is not None:
            moved.specs.add().ParseFromString(self.spec)
            moved.orders.append(self.record.order)
        return control_pb2.FrozenStore(store=moved)


Frozen = list[control_pb2.FrozenStore | _PackedStore]
"""What is kept of each store; there may be many packed ones, each of which is described when it is asked for."""


class ReportedCheckpoint(NamedTuple):
    """A checkpoint that a client has written.

    Attributes:
        id: Names it at its place.
        created_s: Its moment, by the monotonic clock.
    """

    id: str
    created_s: float

    @property
    def age_s(self) -> float:
        """Time since its moment."""
        return max(time.monotonic() - self.created_s, 0.0)


class _ValuesToCopy(NamedTuple):
    """The values of a store at the moment of a checkpoint.

    Attributes:
        folder: Where they are, below the store's folder.
        pinned: Keeps them.
    """

    folder: Path
    pinned: PinnedValues

    @classmethod
    def of(cls, store: OpenedStore) -> _ValuesToCopy | None:
        """Keeps the values of a store; None if it has none."""
        if store.generations is None:
            return None
        folder = object_folders.get_folder(store.folder, store.generations.objects_epoch)
        if not Objects.exists(folder):
            return None
        return cls(folder.relative_to(store.folder), PinnedValues(folder))

    def add_to(self, files: control_pb2.FileSizes, target: Path) -> None:
        """Copies them to the store's copy, a folder, and lists them with its files."""
        folder = target / self.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.nbytes.append(self.pinned.copy(folder))
        files.paths.append(str(self.folder / DATA_FILE).encode())
        files.changed.append(b"")


class _Idle(NamedTuple):
    """A store that was not in use when it was listed.

    Attributes:
        used_at: When it was last used.
        frozen: As a checkpoint has it, if it was not used since.
    """

    store: OpenedStore
    used_at: int
    frozen: control_pb2.FrozenStore


_Step = Callable[
    [ClientSession, Seal, control_pb2.CheckpointRequest], Coroutine[None, None, control_pb2.CheckpointAnswer]
]


class Checkpoints:
    """The steps of checkpoints. Each is safe to repeat.

    Args:
        stores: All stores of the server.

    Attributes:
        last: The last one that a client has reported; None if none has.
    """

    last: ReportedCheckpoint | None = None

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._sealing = Sealing(stores)
        self._lists = FileLists()
        self._frozen: dict[Seal, Frozen] = {}
        self._freezing: set[str] = set()  # ids of the checkpoints that are being kept just now
        self._idle: dict[Seal, dict[str, _Idle]] = {}  # by name
        self._steps: Mapping[str, _Step] = {  # in the order in which a client takes them
            "list_files": self._list_files,
            "read": self._read,
            "list_unread": self._list_unread,
            "freeze": self._freeze,
            "list_frozen": self._list_frozen,
            "read_frozen": self._read_frozen,
            "end": self._end,
            "report": self._report,
        }

    def restore(self) -> None:
        """Removes what a restart has interrupted."""
        self._stores.root.empty_checkpoints()

    async def serve(
        self, session: ClientSession, request: int, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.Done:
        """Takes one step.

        Raises:
            StoreNotFoundError: There is no such store or incarnation.
            DeadlineExceededError: A client is still writing, or was stopped while it did; nothing was kept.
            CapacityError: There is no room for what has to be kept.
            PeerLostError: The session has ended; nothing is kept for it.
            WrongStateError: Nothing was kept for this checkpoint.
        """
        await inline_tasks.ensure_task()
        name, by = asked.WhichOneof("step") or "", Seal(session.number, asked.checkpoint)
        if (step := self._steps.get(name)) is None:
            raise RemoteProtocolError(expected="a step of a checkpoint", received=name or "an empty message")
        return control_pb2.Done(checkpoint=await step(session, by, asked))

    async def on_session_ended(self, session: int) -> None:
        """Removes what was kept for the checkpoints of a session."""
        self._lists.forget_session(session)
        self._stores.seals.end_slow_creations_of(session)
        for by in [by for by in self._idle if by.session == session]:
            del self._idle[by]
        for by in [by for by in self._frozen if by.session == session]:
            await self._forget(by)

    async def _forget(self, by: Seal) -> None:
        if self._frozen.pop(by, None) is not None:
            folder = self._stores.root.checkpoint_folder(by.operation)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # ------------------------------------------------------------ while the stores serve

    async def _list_files(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        store = await self._get(asked.store)
        used_at, is_idle = store.used_at, self._is_idle(store)
        files = await self._lists.list_files(store, by, with_values=False)
        idle = self._idle.setdefault(by, {})
        idle.pop(store.name, None)
        if is_idle and self._is_idle(store):
            frozen = control_pb2.FrozenStore(store=describe_store(self._stores, store), files=clear_changed(files))
            idle[store.name] = _Idle(store, used_at, frozen)
        return control_pb2.CheckpointAnswer(files=files, uid=store.record.uid)

    async def _read(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        store = await self._get(asked.store, asked.uid)
        return control_pb2.CheckpointAnswer(blocks=await read_blocks(store.folder, asked.read.blocks))

    async def _list_unread(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        """Lists stores that a checkpoint has not read; if they are many once it has read others, they were made faster
        than it reads them, and those that come are made slowly until the moment."""
        answer, nbytes, after = control_pb2.CheckpointAnswer(), 0, asked.list_unread
        names = [record.name for record in self._list_records()]
        unread = [name for name in names if name > after and not self._lists.has_listed(name, by)]
        if not after and MANY_UNREAD < len(unread) < len(names):
            self._stores.seals.slow_creations(by)
        for name in sorted(unread):
            answer.names.append(name)
            nbytes += len(name.encode())
            if nbytes >= MAX_ANSWER_BYTES:
                break
        return answer

    # ------------------------------------------------------------ one moment

    async def _freeze(
        self, session: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        if by.operation in self._freezing:  # both would write the same folder
            raise WrongStateError(state=f"checkpoint {by.operation} is being kept", event="keeping it once more")
        self._freezing.add(by.operation)
        try:
            return await self._freeze_once(session, by, asked.freeze, Deadline.after(asked.timeout_s))
        finally:
            self._freezing.discard(by.operation)
            self._stores.seals.end_slow_creations(by)

    async def _freeze_once(
        self, session: ClientSession, by: Seal, max_bytes: int, deadline: Deadline
    ) -> control_pb2.CheckpointAnswer:
        await self._forget(by)
        for record in self._list_records():
            await self._open(record.name)  # so that no request waits for that
        begun_s = time.monotonic()
        sealed: dict[str, OpenedStore] = {}
        pinned: list[_ValuesToCopy | None] = []
        kept: list[control_pb2.FrozenStore] = []
        catalog: PinnedCatalog | None = None
        folder = self._stores.root.checkpoint_folder(by.operation)
        try:
            with self._stores.seals.hold_creations():
                try:
                    await self._seal_all(by, sealed, deadline)
                    reach("checkpoint.resting")
                    # Of the same moment, since nothing was awaited after the last look:
                    idle = [self._find_idle(by, record.name) for record in self._list_records()]
                    packed = [each for each in self._stores.catalog if each.packed and not each.loading]
                    catalog = self._stores.db.pin()
                    compare = self._lists.begin_compare(sealed.values(), by)
                    folders = [(store.folder, folder / store.record.uid) for store in sealed.values()]
                    files, num_bytes = await asyncio.to_thread(_keep_changed, compare, folders, max_bytes)
                    if num_bytes > max_bytes:
                        return control_pb2.CheckpointAnswer(num_bytes=num_bytes, paused_s=time.monotonic() - begun_s)
                    check_open(session)
                    frozen = self._frozen[by] = []  # what is kept goes with the session from here on
                    for store, listed in zip(sealed.values(), files, strict=True):
                        kept.append(control_pb2.FrozenStore(store=describe_store(self._stores, store), files=listed))
                        pinned.append(_ValuesToCopy.of(store))
                finally:
                    for name in sealed:
                        self._sealing.end(name, by)
            paused_s = time.monotonic() - begun_s
            reach("checkpoint.kept")
            for each, values in zip(kept, pinned, strict=True):
                if values is not None:
                    uid = StoreRecord.from_bytes(each.store.record).uid
                    await asyncio.to_thread(values.add_to, each.files, folder / uid)
                    check_open(session)  # else the folder, which went with it, is there once more
            frozen += [*kept, *filter(None, idle)]
            frozen += await asyncio.to_thread(_read_packed, catalog, packed)
            check_open(session)
        except BaseException:
            self._frozen.setdefault(by, [])
            await asyncio.shield(self._forget(by))
            raise
        finally:
            if catalog is not None:
                catalog.close()
            for values in pinned:
                if values is not None:
                    values.pinned.close()
        return control_pb2.CheckpointAnswer(num_bytes=num_bytes, num_stores=len(frozen), paused_s=paused_s)

    def _list_records(self) -> list[StoreRecord]:
        return [record for record in self._stores.catalog if _has_files(record)]

    def _is_idle(self, store: OpenedStore) -> bool:
        """Returns whether nothing that has begun can still change a store; values change unseen."""
        table = store.table
        is_in_use = store.writes or store.lost or (table is not None and (table.claims or table.ring.num_reserved))
        has_values = store.versions is None and object_folders.has_values(store.folder)
        return not is_in_use and not has_values and self._stores.seals.is_idle(store.name)

    def _find_idle(self, by: Seal, name: str) -> control_pb2.FrozenStore | None:
        """Returns a store as it was listed, if it was not used since."""
        listed, store = self._idle.get(by, {}).get(name), self._stores.opened.peek(name)
        is_same = listed is not None and store is listed.store and store.used_at == listed.used_at
        return listed.frozen if listed is not None and is_same else None

    async def _get(self, name: str, uid: str | None = None) -> OpenedStore:
        """Returns a store of this incarnation, None for any. Raises StoreNotFoundError."""
        store = await self._open(name)
        if store is None or uid not in (None, store.record.uid):
            raise StoreNotFoundError(name=name)
        return store

    async def _open(self, name: str) -> OpenedStore | None:
        """Returns a store that has files of its own; None if it does not exist, or is damaged. One that is open does
        not count as used."""
        record = self._stores.catalog.find(name)
        if record is None or not _has_files(record):
            return None
        if (store := self._stores.opened.peek(name)) is not None:
            return store
        try:
            await self._stores.open_apart(name)
            return self._stores.find(name)
        except (StoreNotFoundError, CorruptDataError):
            return None

    async def _seal_all(self, by: Seal, sealed: dict[str, OpenedStore], deadline: Deadline) -> None:
        """Brings all stores to rest that were used since they were listed, also those that are made in the meantime."""
        damaged: set[str] = set()

        def is_in_use(name: str) -> bool:
            return name not in sealed and name not in damaged and self._find_idle(by, name) is None

        while new := [record.name for record in self._list_records() if is_in_use(record.name)]:
            found = {name: await self._open(name) for name in new}
            damaged.update(name for name, store in found.items() if store is None)
            opened = [store for store in found.values() if store is not None]
            for store in opened:
                self._sealing.begin(store, by)
                sealed[store.name] = store
            for store in opened:
                name = store.name
                try:
                    sealed[name] = await self._sealing.wait_at_rest(store, by, deadline, keeps_unfinished=True)
                except StoreNotFoundError:  # a request that had begun before has deleted it
                    del sealed[name]
                    self._sealing.end(name, by)

    # ------------------------------------------------------------ what was kept

    def _get_frozen(self, by: Seal) -> Frozen:
        if by not in self._frozen:
            raise WrongStateError(state="nothing is kept for it", event=f"a read of checkpoint {by.operation}")
        return self._frozen[by]

    async def _list_frozen(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        answer, nbytes = control_pb2.CheckpointAnswer(), 0
        for each in islice(self._get_frozen(by), asked.list_frozen, None):
            store = each.describe() if isinstance(each, _PackedStore) else each
            answer.stores.append(store)
            nbytes += store.ByteSize()
            if nbytes >= MAX_ANSWER_BYTES:
                break
        return answer

    async def _read_frozen(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        self._get_frozen(by)
        folder = self._stores.root.checkpoint_folder(by.operation) / check_uid(asked.uid)
        return control_pb2.CheckpointAnswer(blocks=await read_blocks(folder, asked.read_frozen.blocks))

    async def _end(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        if by.operation in self._freezing:
            raise WrongStateError(state=f"checkpoint {by.operation} is being kept", event="ending it")
        self._stores.seals.end_slow_creations(by)
        self._idle.pop(by, None)
        await self._forget(by)
        return control_pb2.CheckpointAnswer()

    async def _report(
        self, _: ClientSession, by: Seal, asked: control_pb2.CheckpointRequest
    ) -> control_pb2.CheckpointAnswer:
        self.last = ReportedCheckpoint(asked.report.id[:MAX_ID], time.monotonic() - asked.report.age_s)
        return control_pb2.CheckpointAnswer()


def _has_files(record: StoreRecord) -> bool:
    return not (record.loading or record.packed or record.adopted)


def _read_packed(catalog: PinnedCatalog, records: Sequence[StoreRecord]) -> list[_PackedStore]:
    """Returns what the catalog has of stores without files; those of which it has not all are left out."""
    # What has moved is in the checkpoint of the server that has it; where it is now need not be true later.
    records = [each for each in records if is_listed(each)]
    contents = catalog.get_many("packed", (each.uid.encode() for each in records))
    keys = [make_keys(each.fingerprint, each.order)[-1] for each in records]
    specs = catalog.get_many("specs", set(filter(None, keys)))
    return [
        _PackedStore(each, contents[each.uid.encode()], specs.get(key))
        for each, key in zip(records, keys, strict=True)
        if each.uid.encode() in contents and (key in specs or not key)
    ]


def _keep_changed(
    compare: Callable[[], list[control_pb2.FileSizes]], folders: Sequence[tuple[Path, Path]], max_bytes: int
) -> tuple[list[control_pb2.FileSizes], int]:
    """Copies what has changed of stores at rest, unless it is too much; returns their files and its size."""
    files = compare()
    num_bytes = sum(map(count_changed_bytes, files))
    if num_bytes <= max_bytes:
        for listed, (folder, target) in zip(files, folders, strict=True):
            numbers = {file.path: file.numbers.tolist() for file in iter_changed(listed) if len(file.numbers)}
            moved_files.copy_blocks(folder, target, numbers)
    return files, num_bytes
