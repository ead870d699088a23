"""The client of one tensordict store: its structure as last read, its content, and changes of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    KeyNotFoundError,
    LockedError,
    SelectionError,
    SpecMismatchError,
    StructureChangedError,
    TDServeError,
)
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.padding import Pad
from tdserve.client.datasets.dataset import read_into_shared_memory
from tdserve.client.handles.coerce import Manner
from tdserve.client.handles.mapped_leaves import map_store, read_small_leaf
from tdserve.client.handles.overwriting import overwrite
from tdserve.client.handles.schema_changes import alter, capture_addition, merge_captures
from tdserve.client.session.by_address import ByAddress
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.messages.selection.dimension_names import select_names
from tdserve.messages.selection.selection import encode
from tdserve.structure.captures.captured import Captured
from tdserve.structure.tensordicts.entries import get_entry, name_dims
from tdserve.structure.trees.altering import Renaming
from tdserve.structure.trees.nodes import find_entry
from tdserve.structure.trees.tree import Node, Path, Spec, show
from tdserve.v1 import control_pb2

_Result = TypeVar("_Result")

Sizes = tuple[int, ...]
"""A batch size."""


class StoreClient(ByAddress):
    """Reads and writes one store, and changes its keys. A handle and its views hold one.

    It caches the structure of the store, which other clients may change, and asks the server for the newest where it
    matters. Each method is a step of a call, and ends by the deadline of that. Threads: safe. Processes: safe, whether
    it is pickled (by address) or forked.

    Attributes:
        name: Name of the store.
        uid: Incarnation of the store, read together with ``spec``.
        spec: Its structure when it was last read.
        shares_non_tensor: Whether its non-tensor leaves are live.
    """

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._client = client
        self.name = description.name
        self.uid = description.uid
        self.spec = description.spec
        self.shares_non_tensor = description.share_non_tensor
        self._structure = (description.uid, description.structure)
        self._is_outdated = False

    @property
    def client(self) -> SessionClient:
        """The client of this process."""
        return self._client

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call that begins now; None is the client's default timeout."""
        return self._client.make_deadline(timeout_s)

    # ------------------------------------------------------------ structure

    def refresh(self, deadline: Deadline) -> bool:
        """Asks the server for the store's structure; returns whether it differs from the one known here.

        Raises:
            StoreNotFoundError: The store was deleted.
            WrongStateError: A store of another kind has its name. What is known here stays as it was.
        """
        found = self._client.catalog.describe_briefly(self.name, deadline)
        is_other = found.fingerprint != self.spec.fingerprint
        if is_other or found.kind != control_pb2.STORE_KIND_TENSORDICT:
            description = self._client.catalog.describe_existing(self.name, deadline)
            description.check_kind("tensordict")
            self.spec, self.uid = description.spec, description.uid
            self._structure = (description.uid, description.structure)
        else:
            self._structure = (found.uid, found.structure)
        self._is_outdated = False
        return is_other

    def renew(self, deadline: Deadline) -> None:
        """Asks for the structure if it is out of date because of a change that this client has made; see ``alter``."""
        if self._is_outdated:
            self.refresh(deadline)

    def has(self, path: Path) -> bool:
        """Returns whether the store has an entry at this path, as far as is known here."""
        return find_entry(self.spec.root, path) is not None

    def check_unlocked(self, path: Path) -> None:
        """Raises LockedError if the node at ``path``, or one above it, is locked."""
        for depth in range(len(path) + 1):
            entry = find_entry(self.spec.root, path[:depth])
            if isinstance(entry, Node) and entry.is_locked:
                raise LockedError(store=self.name, key=show(path[:depth]) if depth else "")

    def retry(self, access: Callable[[], _Result], deadline: Deadline, *, is_write: bool = False) -> _Result:
        """Performs an access, and repeats it once if it failed because the structure known here is out of date.

        A write is not repeated if another store has this name by now: the caller may not mean that one.
        """
        if not is_write:  # the server refuses a write that does not fit, and only then the structure is asked for
            self.renew(deadline)
        uid, spec = self.uid, self.spec
        try:
            return access()
        except (KeyNotFoundError, SpecMismatchError, SelectionError, LockedError):
            is_other = self.refresh(deadline) or self.spec is not spec  # the access itself may have refreshed it
            if not is_other or (is_write and self.uid != uid):
                raise
        return access()

    def retry_write(self, access: Callable[[], _Result], deadline: Deadline) -> _Result:
        """Repeats a write as ``retry`` does, until it succeeds, or is refused though nothing has changed since the
        attempt; stops when time is up.

        Raises:
            WrongStateError: A store of another kind has the name. Nothing was written.
        """
        uid = self.uid
        while True:
            known = self.spec, self._structure
            try:
                return self.retry(access, deadline, is_write=True)
            except StructureChangedError:
                if self.uid != uid or deadline.expired:
                    raise
                self.refresh(deadline)
                if self.spec is known[0] and self._structure == known[1]:
                    raise

    # ------------------------------------------------------------ changes of keys

    def set_locked(self, is_locked: bool, deadline: Deadline) -> bool:
        """Locks or unlocks all keys; returns whether that changed anything."""
        self.refresh(deadline)
        is_changed = self.spec.with_locked(is_locked) != self.spec
        if is_changed:
            self.alter(is_locked=is_locked, deadline=deadline)
        return is_changed

    def add(
        self,
        fresh: dict[Path, Any],
        deadline: Deadline,
        *,
        known: dict[Path, Any] | None = None,
        is_value: bool = False,
        replaces: Iterable[Path] = (),
    ) -> None:
        """Adds entries, and writes ``known``, new values of existing entries, in the same change."""
        allow_pickle = self._client.allow_pickle
        content = capture_addition(self.spec, fresh, store=self.name, allow_pickle=allow_pickle, is_value=is_value)
        if known:
            content = merge_captures(self.spec, known, content, store=self.name, allow_pickle=allow_pickle)
        self.alter(content=content, replaces=(*replaces, *(known or ())), deadline=deadline)

    def alter(
        self,
        *,
        content: Captured | None = None,
        zeros: Spec | None = None,
        replaces: Iterable[Path] = (),
        removed: Iterable[Path] = (),
        renamed: Iterable[Renaming] = (),
        is_locked: bool | None = None,
        deadline: Deadline,
    ) -> None:
        """Changes keys, or the lock, in one step; arguments and errors as in ``schema_changes.alter``.

        Then it asks for the structure. If there is no answer in time, or an error, the change was made all the same,
        and no error is raised: the structure that is known here counts as out of date, and the next call that depends
        on it asks again.
        """
        alter(
            self._client,
            self.name,
            content=content,
            zeros=zeros,
            replaces=replaces,
            removed=removed,
            renamed=renamed,
            is_locked=is_locked,
            deadline=deadline,
        )
        try:
            self.refresh(deadline)
        except TDServeError:
            self._is_outdated = True

    # ------------------------------------------------------------ content

    def read_small_leaf(self, path: Path) -> torch.Tensor | None:
        """Reads a leaf in the cheapest way; None if that is not possible."""
        check_real("reading a store")
        return None if self._is_outdated else read_small_leaf(self._client, self.name, self.spec, path)

    def read(
        self,
        index: Any,
        keys: Sequence[Path] = (),
        *,
        numbered_in: Sizes | None = None,
        device: torch.device | str | None = None,
        pad: Pad = None,
        deadline: Deadline,
    ) -> Any:
        """Reads rows of some entries, or of everything if no keys are given; never live.

        Nodes above the entries are included.

        Args:
            index: As in ``tensordict[index]``. It means rows of the store that is read, also if that is another one
                than this client has seen last.
            numbered_in: As in ``write_rows``.
        """

        def read() -> Any:
            for path in keys:
                self.spec.find(path, store=self.name)
            return self._read_resolved(index, keys, numbered_in, deadline, device, pad)

        return self.retry(read, deadline)

    def _read_resolved(
        self, index: Any, keys: Sequence[Path], numbered_in: Sizes | None, deadline: Deadline, device: Any, pad: Pad
    ) -> Any:
        """Reads what an index selects; repeats this if it was resolved for another number of rows than were read."""
        while True:
            known = self.spec
            self._check_numbered(known, numbered_in)
            selection = encode(index, batch_size=known.batch_size, store=self.name)
            content = require_content(
                read_selection(self._client, self.name, selection, keys=keys, spec=known, deadline=deadline)
            )
            stored = known if content.stored is None else content.stored
            self.spec = stored
            if stored.batch_size == known.batch_size:
                break
            self._check_numbered(stored, numbered_in)
            if selection.is_everything:
                break
        td = content.build(device, pad)
        names = select_names(stored.root.names, stored.batch_size, selection)
        if names is not None:
            name_dims(td, names)
        return td

    def _check_numbered(self, spec: Spec, numbered_in: Sizes | None) -> None:
        """Raises SpecMismatchError if rows were numbered in a store of another batch size than this one."""
        if numbered_in is not None and spec.batch_size != numbered_in:
            expected = f"batch size {list(numbered_in)}, which it had when this view or iteration was made"
            actual = f"batch size {list(spec.batch_size)}: the store was recreated; make it again from the handle"
            raise SpecMismatchError(store=self.name, key="", expected=expected, actual=actual)

    def read_at(self, path: Path, index: Any, deadline: Deadline, pad: Pad = None) -> Any:
        """Reads rows of one entry, with the nodes above it; never live."""
        return self.read(index, (path,), pad=pad, deadline=deadline)

    def hand_over(self, found: Any, numpy: bool | None = None, device: Any = None) -> Any:
        """Returns what was read in the form that the caller asked for; arguments as in its ``is_numpy_wanted``."""
        return self._client.hand_over(found, numpy, device)

    def read_into_shared_memory(self) -> None:
        """Prepares for a batch that is passed to another process, in a worker of a ``DataLoader``."""
        read_into_shared_memory(self._client)

    def map(self, *, writable: bool = False, deadline: Deadline) -> Any:
        """Maps the store's memory; see ``StoreHandle.map``."""
        return map_store(self._client, self.name, self.spec, writable=writable, deadline=deadline)

    def write_rows(
        self,
        index: Any,
        value: Any,
        *,
        at: Path = (),
        manner: Manner = Manner.ROWS,
        numbered_in: Sizes | None = None,
        deadline: Deadline,
    ) -> None:
        """Writes rows of the leaves that ``value`` has, or of the entry at a key.

        Args:
            manner: Which of tensordict's calls is performed.
            numbered_in: Batch size of the store in which the rows of the index were numbered: a store of another one
                is refused, with SpecMismatchError. None: the index is the caller's.
        """
        check_real("writing to a store")

        def write() -> None:
            self._check_numbered(self.spec, numbered_in)
            self.spec.find(at, store=self.name)
            overwrite(
                self._client,
                self.name,
                self.spec,
                index,
                value,
                at=at,
                manner=manner,
                shared=partial(self._read_shared, deadline),
                deadline=deadline,
            )

        self.retry_write(write, deadline)

    def perform_write(self, write: Callable[[], Any], deadline: Deadline, return_early: bool) -> Any:
        """Performs a write now, or in the background and returns a future of its result."""
        return self._client.perform(write, deadline, return_early)

    def _read_shared(self, deadline: Deadline, path: Path) -> Any:
        """Reads what all rows share at a key."""
        return get_entry(self.read_at(path, (0,) * len(self.spec.batch_size), deadline), path)
