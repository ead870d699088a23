"""Makes stores of users' folders: the tensors stay in the folder and are served from there.

A client must not make the server open arbitrary paths. Any folder is adopted for a client that has proved that it can
write to the server's root, since it could put anything there itself. For other clients the folder must lie below one
that the server's configuration names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path as FilePath

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSpecError,
    NotSupportedError,
    StoreExistsError,
    TooLargeError,
)
from tdserve.base.ids import check_store_name
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.creation import CREATION_TIMEOUT_S
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.database.catalog_db import Transaction
from tdserve.store.durability.bare_rows import describe_lacking
from tdserve.store.rows.adoptable import MAX_META_BYTES, META_FILE, FoundFolder, has_meta, read_folder
from tdserve.store.rows.adopted import Adopted, is_within, resolve_path
from tdserve.store.rows.format import ROWS
from tdserve.structure.trees.tree import Path, ValueLeaf
from tdserve.v1 import content_pb2, control_pb2, worker_pb2
from tdserve.values.value_codec import encode_many, encode_value
from tdserve.values.value_columns import Buffer, encode_column, measure_sizes


class Adoption:
    """The adoption of folders as stores.

    Args:
        stores: The server's stores.
        answers: Answers of committed requests, for their retries.
        values_worker: Data worker that writes non-tensor values.
        folders: Folders below which every client may have folders adopted.
    """

    def __init__(
        self, stores: Stores, answers: CommittedAnswers, *, values_worker: DataWorker, folders: Sequence[str] = ()
    ) -> None:
        self._stores = stores
        self._answers = answers
        self._worker = values_worker
        self._folders = tuple(os.path.realpath(folder) for folder in folders)
        self._root = os.path.realpath(stores.root.path)

    async def adopt(self, session: ClientSession, request: int, asked: control_pb2.AdoptRequest) -> control_pb2.Done:
        """Makes a store of a folder, or accepts the existing one with ``exists_ok``.

        Raises:
            NotSupportedError: The client may not adopt this folder, or it holds what a store cannot hold in place.
            StoreExistsError, InvalidRequestError, InvalidSpecError, CorruptDataError, CapacityError: Nothing was
                created.
        """
        await inline_tasks.ensure_task()
        name = check_store_name(asked.name)
        path = await asyncio.to_thread(resolve_path, asked.path)
        self._check_allowed(session, asked.path, path)
        done = control_pb2.Done()
        if await self._find(name, path, read_only=asked.read_only, exists_ok=asked.exists_ok):
            return done
        store = await self._create(name, path, read_only=asked.read_only)
        answer = done.SerializeToString()
        await self._show(store, self._answers.begin_transaction(session.client_id, request, answer))
        return done

    async def adopt_at_start(self, name: str, path: str, *, read_only: bool) -> None:
        """Makes a store of a folder that the server was started with, unless the store exists."""
        found = resolve_path(path)
        if not await self._find(check_store_name(name), found, read_only=read_only, exists_ok=True):
            store = await self._create(name, found, read_only=read_only)
            await self._show(store, self._stores.db.begin_transaction())

    async def _show(self, store: OpenedStore, transaction: AbstractContextManager[Transaction]) -> None:
        """Makes a store visible; deletes it if that fails."""
        try:
            with transaction as txn:
                self._stores.publish_loaded(store, txn)
        except BaseException:
            await self._stores.delete(store)
            raise

    def _check_allowed(self, session: ClientSession, asked: str, path: str) -> None:
        """Raises NotSupportedError unless the client may have this folder opened; reveals nothing about its content."""
        if session.movers.writes.lock_name:
            return
        if any(is_within(path, folder) for folder in self._folders):
            return
        reason = (
            "only clients that share the server's root folder and may write it can have any folder adopted, others "
            "those below the folders that were named to the server (tdserve serve --adoptable DIR, TDSERVE_ADOPTABLE)"
        )
        raise NotSupportedError(feature=f"adopting {asked}", reason=reason)

    async def _find(self, name: str, path: str, *, read_only: bool, exists_ok: bool) -> bool:
        """Returns whether exactly this store exists. Raises StoreExistsError if another one has the name."""
        if exists_ok:  # another request may be adopting it right now
            await self._stores.wait_settled(name, Deadline.after(CREATION_TIMEOUT_S))
        if not self._stores.catalog.is_taken(name):
            return False
        record = self._stores.catalog.find(name)
        if record is None or not exists_ok:
            self._stores.catalog.check_free(name)
            raise StoreExistsError(name=name)
        if record.adopted != path:
            raise StoreExistsError(name=name, reason=_describe_origin(record))
        if record.read_only != read_only:
            raise StoreExistsError(name=name, reason=f"it was adopted with read_only={record.read_only}")
        return True

    async def _create(self, name: str, path: str, *, read_only: bool) -> OpenedStore:
        """Creates a store, with its non-tensor values, that is not visible yet."""
        if is_within(path, self._root) or is_within(self._root, path):
            reason = f"{path} is the server's own, in its root {self._root}"
            raise InvalidRequestError(argument="path", reason=reason)
        if not await asyncio.to_thread(_has_meta, path):
            reason = f"{path} is no folder that tensordict's memmap has written: it has no {META_FILE} to be read"
            raise InvalidRequestError(argument="path", reason=reason)
        if lacking := await asyncio.to_thread(_describe_lacking, path):
            reason = (
                f"it is the folder {ROWS!r} of a server's store, and would be served without {lacking}; if its tensors "
                f"are all that is wanted, move or copy it out of {os.path.dirname(path)}, and adopt it there"
            )
            raise NotSupportedError(feature=f"adopting {path}", reason=reason)
        found = await asyncio.to_thread(_read_adopted, name, path, writable=not read_only)
        block = await asyncio.to_thread(encode_values, found)
        spec = found.spec
        record = StoreRecord(
            name=name,
            kind="tensordict",
            uid="",
            fingerprint=spec.fingerprint,
            num_rows=spec.num_rows,
            loading=True,
            max_object_bytes=0,
            adopted=path,
            read_only=read_only,
        )
        adopted, check = Adopted.from_folder(found, read_only=read_only), partial(self._check_unshared, record)
        store = await self._stores.create(record, spec, adopted=adopted, check=check)
        try:
            if block:
                await self._store(store, block)
            store.get_generation_values()[:] = 2
            store.check_present()
        except BaseException:
            await self._stores.delete(store)
            raise
        return store

    def _check_unshared(self, record: StoreRecord) -> None:
        """Raises StoreExistsError if a store that may write files of this one exists, or one whose files it may write.
        Another may have been adopted for as long as this one has waited to be created."""
        for other in self._stores.catalog.find_overlapping(record.adopted):
            if not (other.read_only and record.read_only):
                raise StoreExistsError(name=other.name, reason=_describe_shared(other))

    async def _store(self, store: OpenedStore, block: bytes) -> None:
        order = worker_pb2.Order()
        order.put_values.values = block
        order.put_values.keys.extend(content_pb2.Path(parts=path) for path, _ in store.spec.values)
        await self._worker.ready.wait()
        order.put_values.store.CopyFrom(store.make_ref(self._worker.known_specs))
        await self._worker.submit(order)


def _read_adopted(name: str, path: str, *, writable: bool) -> FoundFolder:
    """Reads the folder of a store. What reads a structure knows neither of the two, which the error has to name."""
    try:
        return read_folder(path, writable=writable, reserves=writable)
    except InvalidSpecError as error:
        raise InvalidSpecError(store=name, reason=f"in the folder {path}, {error.reason}") from error


def _has_meta(path: str) -> bool:
    try:
        return has_meta(path)
    except CorruptDataError:  # not a folder
        return False


def _describe_lacking(path: str) -> str:
    """Returns what a store's ``rows`` folder from another root lacks; "" for any other folder."""
    folder, name = os.path.split(path)
    return describe_lacking(FilePath(folder)) if name == ROWS else ""


def _describe_origin(record: StoreRecord) -> str:
    return f"it was adopted from {record.adopted}" if record.adopted else "it was not adopted from a folder"


def _describe_shared(other: StoreRecord) -> str:
    return f"it was adopted from {other.adopted}, and two stores would share files; adopt both with read_only=True"


def encode_values(found: FoundFolder) -> bytes:
    """Returns the non-tensor values of a folder as the message that the data worker stores; b"" if there are none.

    Raises:
        TooLargeError: They do not fit into one message.
        NotSupportedError: A value is nested too deeply; the error names its key.
    """
    parts: list[Buffer] = []
    for path, leaf in found.spec.values:
        blobs = _encode_value(found, path, leaf)
        parts += encode_column(leaf.per_row, measure_sizes(blobs), blobs)
    nbytes = sum(map(len, parts))
    if nbytes > MAX_META_BYTES:
        raise TooLargeError(what=f"the values of {found.path} in one message", asked=nbytes, free=MAX_META_BYTES)
    return b"".join(parts)


def _encode_value(found: FoundFolder, path: Path, leaf: ValueLeaf) -> list[bytes]:
    key = ".".join(path)
    values = found.values[path]
    if not leaf.per_row:
        return [encode_value(values, key=key)]
    for _ in leaf.batch_size[1:]:
        values = [value for row in values for value in row]
    return encode_many(values, key=key)
