"""Brings the stores of a checkpoint back to a server: each as a new store, with the content that it had.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
    WrongStateError,
)
from tdserve.base.ids import make_uid
from tdserve.client.moves.manifest import ArchivedStore, Checkpoint, read_block
from tdserve.client.moves.move_steps import MAX_ATTEMPTS, UNDO_S, request_step
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import delete_store
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.placement import find_whole
from tdserve.rules.replay.settings import Settings
from tdserve.store.roots.archive import Archive
from tdserve.store.roots.moved_files import compute_zero_digest
from tdserve.v1 import control_pb2


class RestoreProgress(NamedTuple):
    """How far a restore has come.

    Attributes:
        store: Name of the store that is being written.
        nbytes: Bytes of files that are in place.
        total_nbytes: Bytes of all files.
    """

    store: str
    nbytes: int
    total_nbytes: int


class Copies(NamedTuple):
    """The stores that are made of those of a checkpoint.

    Attributes:
        names: New name of each store, by the name of the original.
        uids: Incarnation of each, by that of the original.
    """

    names: dict[str, str]
    uids: dict[str, str]

    def rename_policy(self, settings: str) -> str:
        """Returns a table's settings with the name that its policy has now."""
        found = Settings.from_json(settings)
        if not found.policy:
            return settings
        return replace(found, policy=self.names.get(found.policy, found.policy)).to_json()

    def find_policy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns what changes in a table's state since its policy is a copy: one on another server, of which nothing
        is known here, is the next that is heard of."""
        uid = state.get("policy_uid", "")
        if uid in self.uids:
            return {"policy_uid": self.uids[uid], "policy_elsewhere_since_s": None}
        is_elsewhere = state.get("policy_elsewhere_since_s") is not None
        return {"policy_uid": "", "policy_elsewhere_since_s": 0.0} if is_elsewhere else {}


MAX_NAMED = 5
"""Checkpoints, or stores of one, that an error names."""

MAX_LATE = 10
"""Requests to take back a restore that the server does not answer in time, after which no more are sent."""

OnRestore = Callable[[RestoreProgress], None]


@dataclass(frozen=True)
class RestoreOptions:
    """Arguments of ``Client.restore``.

    Attributes:
        checkpoint: Id of the checkpoint; None: the newest.
        names: Name, or names, of the stores; None: all.
        prefix: Put in front of the name of each.
        deadline: Deadline of the whole restore.
        on_progress: Called after each block.
    """

    checkpoint: str | None
    names: Collection[str] | None
    prefix: str
    deadline: Deadline
    on_progress: OnRestore

    def list_names(self) -> list[str] | None:
        """Returns the names of the stores; None: all.

        Raises:
            InvalidRequestError: One is the name of a part of a shared store, which would belong to nothing.
        """
        if self.names is None:
            return None
        names = [self.names] if isinstance(self.names, str) else [*self.names]
        for name in names:
            if (whole := find_whole(name)) is not None:
                reason = f"{name!r} is a part of {whole!r}; give that name, and all its parts come back"
                raise InvalidRequestError(argument="names", reason=reason)
        return names


def restore_stores(
    client: SessionClient,
    archive: Archive,
    checkpoint: Checkpoint,
    options: RestoreOptions,
    *,
    names: Collection[str] | None,
    taken: Collection[str],
) -> dict[str, str]:
    """Makes stores of a checkpoint stores of a server.

    Args:
        options: How they are restored, whatever its names are.
        names: Names of those; None: all.
        taken: Names that the server's stores have.

    Returns:
        The incarnations of the new stores, by name.

    Raises:
        StoreNotFoundError: The checkpoint has no such store. Nothing was restored.
        StoreExistsError: The server has a store of such a name. Nothing was restored.
        CorruptDataError: A block is missing or damaged. What had been restored was deleted, as after any other error.
        CapacityError: There is no room. Likewise.
    """
    prefix, deadline = options.prefix, options.deadline
    missing = sorted({*(names or ())} - {store.name for store in checkpoint.stores})
    if missing:
        there = sorted(store.name for store in checkpoint.stores)
        listing = f"it has {', '.join(map(repr, there[:MAX_NAMED]))}{', ...' * (len(there) > MAX_NAMED)}"
        raise StoreNotFoundError(name=missing[0], near=f" in checkpoint {checkpoint.id}", listing=listing)
    chosen = [store for store in checkpoint.stores if names is None or store.name in names]
    for store in chosen:
        if prefix + store.name in taken:
            reason = "delete it, or restore under other names, by prefix=, or without it, by names="
            raise StoreExistsError(name=prefix + store.name, reason=reason)
    chosen.sort(key=lambda store: store.kind != "weights")  # tables may follow them
    copies = Copies({store.name: prefix + store.name for store in chosen}, {store.uid: make_uid() for store in chosen})
    total_nbytes, nbytes = sum(store.nbytes for store in chosen), 0
    restored: dict[str, str] = {}
    begun: dict[str, str] = {}
    try:
        for store in chosen:
            name = copies.names[store.name]
            begun[name] = copies.uids[store.uid]
            step = partial(request_step, client, name, move=begun[name], deadline=deadline)
            for come_nbytes in _bring(archive, store, _make_copy(store.moved, copies), step, deadline):
                options.on_progress(RestoreProgress(store.name, nbytes + come_nbytes, total_nbytes))
            restored[name] = begun[name]  # from now on it may be there, whether or not there is an answer
            step(show=True)
            nbytes += store.nbytes
            del begun[name]
    except BaseException:  # an interrupt too: otherwise the next attempt would find their names taken
        take_back(client, restored, begun)
        raise
    return restored


def take_back(
    client: SessionClient, restored: Mapping[str, str], begun: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Deletes stores that were restored, as long as the server answers; none that others have made since.

    Args:
        restored: Their incarnations, by name; of those that are begun too it is unknown whether they are there.
        begun: Moves that are not complete, by the names of their stores.
    """

    def give_up(name: str, deadline: Deadline) -> None:
        request_step(client, name, deadline=deadline, move=begun[name], give_up=True)

    def delete(name: str, deadline: Deadline) -> None:
        delete_store(client, name, uid=restored[name], deletes_record=True, deadline=deadline)

    num_late = 0
    for change, name in (*((give_up, each) for each in begun), *((delete, each) for each in restored)):
        try:
            change(name, Deadline.after(UNDO_S))
        except DeadlineExceededError:  # a deletion that waits for the disk is done
            num_late += 1
            if num_late == MAX_LATE:
                return
        except ConnectError:
            return
        except TDServeError:
            continue


def _bring(
    archive: Archive,
    store: ArchivedStore,
    moved: control_pb2.MovedStore,
    step: Callable[..., object],
    deadline: Deadline,
) -> Iterator[int]:
    """Brings a store to the server, and begins again if that has lost it; yields how many bytes are there."""
    num_attempts = 0
    while True:
        num_attempts += 1
        try:
            yield from accumulate(_write(archive, store, step, deadline))
            step(complete=moved)
            return
        except WrongStateError:  # it was started again
            if num_attempts == MAX_ATTEMPTS or deadline.expired:
                raise


def _write(archive: Archive, store: ArchivedStore, step: Callable[..., object], deadline: Deadline) -> Iterator[int]:
    paths = [bytes.fromhex(file.path) for file in store.files]
    step(receive=control_pb2.FileSizes(paths=paths, nbytes=[file.nbytes for file in store.files]))
    for path, file in zip(paths, store.files, strict=True):
        for offset, size, digest in file.iter_blocks():
            if deadline.expired:
                raise DeadlineExceededError(what=f"the restore of {store.name!r}", timeout_s=deadline.timeout_s)
            if digest != compute_zero_digest(size).hex():
                content = read_block(archive, digest)
                block = control_pb2.FileBlock(path=path, offset=offset, content=content)
                step(write=control_pb2.FileBlocks(blocks=[block]))
            yield size


def _make_copy(moved: control_pb2.MovedStore, copies: Copies) -> control_pb2.MovedStore:
    """Returns what will be on record of a copy: a table follows the copy of its policy."""
    record, state = StoreRecord.from_bytes(moved.record), json.loads(moved.state or b"{}")
    moved.is_copy = True
    if record.kind == "replay":
        moved.record = replace(record, settings=copies.rename_policy(record.settings)).to_bytes()
        if "settings" in state:
            state["settings"] = copies.rename_policy(state["settings"])
        state |= copies.find_policy(state)
        moved.state = json.dumps(state).encode() if state else b""
    return moved
