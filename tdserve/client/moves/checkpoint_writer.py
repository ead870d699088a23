"""Writes a checkpoint of a server: its stores are read while they serve, then as they are at one moment.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    DeadlineExceededError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
    TransferAbortedError,
    WrongStateError,
)
from tdserve.base.failpoints import reach
from tdserve.client.moves.file_passes import FilePasses, FoundBlock
from tdserve.client.moves.manifest import (
    ArchivedFile,
    ArchivedStore,
    Checkpoint,
    list_blocks,
    load_newest,
    make_id,
    save,
    write_block,
)
from tdserve.client.moves.move_steps import UNDO_S, request_checkpoint_step
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES, iter_changed
from tdserve.rules.catalog import StoreRecord
from tdserve.store.roots.archive import Archive
from tdserve.v1 import control_pb2

FROZEN_BYTES = 32 << 20
"""So much change is copied by the server within some tens of milliseconds. What a writer changes between two passes may
be more: then the next pass begins, and twice as much is allowed after it."""

REST_S = 2.0
"""Time for writes under way to end once all stores are sealed. One that lasts longer, such as a gigabyte over a slow
network or that of a client that was stopped, is not waited for: all others would wait as well. The stores serve, and
the checkpoint tries again after a pause."""

RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""The first of these pauses; each is twice as long as the one before, up to the longest."""

STEP_S = 1e-3
"""A checkpoint is at least so much later than the one before, also when the clock was set back: it is the newest."""

FEW_STORES = 16
"""At most this many stores that were made since the pass before are left to the moment itself."""

MAX_MOMENTS = 2
"""Moments of one checkpoint: the server may have forgotten the first one before it was read."""

MAX_PASSES = 10
"""Passes over new stores. From the second one on the server makes stores slowly, so that each has fewer."""

NUM_WRITERS = 4
"""Threads that write blocks to the place, and twice as many blocks that may wait for them."""


class CheckpointProgress(NamedTuple):
    """How far a checkpoint has come.

    Attributes:
        store: Name of the store that is being read.
        read_nbytes: Bytes that were read in all passes.
        written_nbytes: Bytes that no earlier checkpoint had.
    """

    store: str
    read_nbytes: int
    written_nbytes: int


OnCheckpoint = Callable[[CheckpointProgress], None]


def write_checkpoint(
    client: SessionClient,
    names: Iterable[str],
    archive: Archive,
    *,
    server_id: str,
    uid: str,
    deadline: Deadline,
    on_progress: OnCheckpoint,
) -> Checkpoint:
    """Writes a checkpoint of all stores of a server to a place.

    Args:
        names: Names of the stores when it begins, of which it names those that it leaves out.
        server_id: Id of the server.
        uid: Uid of this checkpoint, and of those that are written of other servers at the same time.

    Returns:
        The checkpoint, which is the newest of the place now.

    Raises:
        DeadlineExceededError: The time is over; the error names a store that was being written whenever all were to
            rest. The place has the checkpoints that it had; blocks that were written stay, and the next attempt has
            them.
        TransferAbortedError: The server was restarted twice while it was read. Likewise.
        CapacityError: The place, or the server's disk, is full.
    """
    earlier = load_newest(archive)
    with ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="tdserve-checkpoint") as threads:
        writer = _CheckpointWriter(client, archive, threads, deadline, on_progress, earlier, uid)
        made = replace(writer.run(list(names)), server_id=server_id)
    reach("checkpoint.read")
    save(archive, made)
    return made


@dataclass
class _CheckpointWriter:
    client: SessionClient
    archive: Archive
    threads: ThreadPoolExecutor
    deadline: Deadline
    on_progress: OnCheckpoint
    earlier: Checkpoint | None
    checkpoint: str
    passes: dict[str, FilePasses] = field(default_factory=dict)
    archived: set[str] = field(default_factory=set)
    read_names: list[str] = field(default_factory=list)
    uids: dict[str, str] = field(default_factory=dict)  # of the stores that were read last under a name
    refused: set[str] = field(default_factory=set)
    writing: list[Future[None]] = field(default_factory=list)
    read_nbytes: int = 0
    written_nbytes: int = 0
    awaited: str = ""

    def _know(self, store: ArchivedStore) -> None:
        """Takes note of a store of the checkpoint before. What the place has of it is not read and written again."""
        known = self.passes.setdefault(store.uid, FilePasses())
        for file in store.files:
            path = bytes.fromhex(file.path)
            for offset, _, digest in file.iter_blocks():
                if digest in self.archived:
                    known.digests[path, offset] = bytes.fromhex(digest)

    def run(self, names: list[str]) -> Checkpoint:
        if self.earlier is not None:
            lacking = self.earlier.list_lacking(list_blocks(self.archive))  # lost or cut short since
            self.archived.update(self.earlier.list_digests() - lacking)
            for store in self.earlier.stores:
                self._know(store)
        try:
            frozen, created_s, stores = self._read_moment()
        finally:
            with suppress(TDServeError):  # the end of the session does it too
                request_checkpoint_step(
                    self.client, deadline=Deadline.after(UNDO_S), checkpoint=self.checkpoint, end=True
                )
        for future in self.writing:
            future.result()
        return Checkpoint(
            id=make_id(created_s, self.checkpoint),
            created_s=created_s,
            stores=sorted(stores, key=lambda store: store.name),
            left_out=sorted(name for name in {*names} - {store.name for store in stores} if not self._has_gone(name)),
            paused_s=frozen.paused_s,
            written_nbytes=self.written_nbytes,
        )

    def _read_moment(self) -> tuple[control_pb2.CheckpointAnswer, float, list[ArchivedStore]]:
        """Reads all stores as they are at one moment, and returns what the server has said of it, its time, and the
        stores.

        What the server keeps for that goes with its session, as when it restarts. Then this starts again, once.

        Raises:
            TransferAbortedError: The session was lost each time.
        """
        for _ in range(MAX_MOMENTS):
            frozen = self._freeze()
            created_s = max(time.time(), self.earlier.created_s + STEP_S if self.earlier else 0.0)
            try:
                return frozen, created_s, [self._read_frozen(store) for store in self._list_frozen(frozen.num_stores)]
            except WrongStateError as error:
                lost = error
        reason = (
            f"the server at {self.client.address} was restarted, or the session with it lost, each time that what it "
            "kept for the checkpoint was read; there is no new checkpoint, and the next attempt starts again"
        )
        raise TransferAbortedError(reason=reason) from lost

    def _freeze(self) -> control_pb2.CheckpointAnswer:
        """Reads all stores while they serve, and has the server keep what has changed of them since, at one moment."""
        allowed, retry_s = FROZEN_BYTES, RETRY_S
        while True:
            for name in self.read_names:
                self._read_store(name)
            self._read_new_stores()
            self._check_time()
            try:
                frozen = self._ask(freeze=allowed, timeout_s=self.deadline.limit(REST_S))
                if frozen.num_bytes <= allowed:
                    return frozen
                allowed *= 2
            except DeadlineExceededError as error:
                self.awaited = str(error.fields["what"])
                time.sleep(self.deadline.limit(retry_s))
                retry_s = min(2 * retry_s, MAX_RETRY_S)
            self._check_time()

    # ------------------------------------------------------------ reading

    def _read_new_stores(self) -> None:
        """Reads stores that were not read yet, and those that are made in the meantime, until few are."""
        for _ in range(MAX_PASSES):
            names = self._list_new_names()
            for name in names:
                self._read_store(name)
            self.read_names += names
            if len(names) <= FEW_STORES:
                break

    def _list_new_names(self) -> list[str]:
        known, found, after = set(self.read_names), [], ""
        while names := self._ask(list_unread=after).names:
            found += [name for name in names if name not in known]
            after = names[-1]
        return found

    def _read_store(self, name: str) -> None:
        """Reads what may have changed of a store, while it serves."""
        try:
            listed = self._ask(store=name, list_files=True)
        except TDServeError as error:
            if error.retryable:
                raise
            if not isinstance(error, StoreNotFoundError):
                self.refused.add(name)  # it is damaged, or has no files
            return
        self.uids[name] = listed.uid
        read = partial(self._ask, store=name, uid=listed.uid)
        passes = self.passes.setdefault(listed.uid, FilePasses())
        try:
            for blocks in passes.read(listed.files, lambda asked: read(read=asked).blocks):
                self._take(name, blocks)
        except StoreNotFoundError:
            self.passes.pop(listed.uid, None)

    def _has_gone(self, name: str) -> bool:
        """Returns whether a store was deleted meanwhile, also if its name has a new one, or has moved to another
        server."""
        try:
            found = self.client.catalog.find(name)
            is_refused = found is not None and (found.adopted or name in self.refused)
            return found is None or not (is_refused or found.uid == self.uids.get(name))
        except StoreMovedError as error:
            return error.server is not None
        except CorruptDataError:
            return False

    def _list_frozen(self, num_stores: int) -> Iterable[control_pb2.FrozenStore]:
        found: list[control_pb2.FrozenStore] = []
        while len(found) < num_stores:
            found += self._ask(list_frozen=len(found)).stores
        return found

    def _read_frozen(self, frozen: control_pb2.FrozenStore) -> ArchivedStore:
        """Reads what was kept of a store; all else is as when it was read."""
        record = StoreRecord.from_bytes(frozen.store.record)
        passes = self.passes.get(record.uid, FilePasses())
        read = partial(self._ask, uid=record.uid)
        for blocks in passes.read(frozen.files, lambda asked: read(read_frozen=asked).blocks):
            self._take(record.name, blocks)
        files = [
            ArchivedFile(
                path=file.path.hex(),
                nbytes=file.nbytes,
                digests=[passes.digests[file.path, offset].hex() for offset in range(0, file.nbytes, MAX_BLOCK_BYTES)],
            )
            for file in iter_changed(frozen.files)
        ]
        on_record = frozen.store.SerializeToString().hex()
        return ArchivedStore(record.name, record.kind, record.uid, on_record, files)

    def _take(self, name: str, blocks: list[FoundBlock]) -> None:
        """Has the content of blocks written, as far as the place lacks it."""
        for block in blocks:
            self.read_nbytes += block.nbytes
            digest = block.digest.hex()
            if digest in self.archived:
                continue
            content = bytes(block.nbytes) if block.content is None else block.content  # only of zeros it is left out
            self.archived.add(digest)
            self.written_nbytes += block.nbytes
            if len(self.writing) >= 2 * NUM_WRITERS:
                self.writing.pop(0).result()
            self.writing.append(self.threads.submit(write_block, self.archive, digest, content))
        self._check_time()
        self.on_progress(CheckpointProgress(name, self.read_nbytes, self.written_nbytes))

    def _check_time(self) -> None:
        if self.deadline.expired:
            what = f"a checkpoint, which waited for {self.awaited}," if self.awaited else "a checkpoint"
            raise DeadlineExceededError(what=what, timeout_s=self.deadline.timeout_s)

    def _ask(self, *, timeout_s: float | None = None, **step: Any) -> control_pb2.CheckpointAnswer:
        """Asks for one step."""
        step["checkpoint"] = self.checkpoint
        return request_checkpoint_step(self.client, deadline=self.deadline, timeout_s=timeout_s, **step)
