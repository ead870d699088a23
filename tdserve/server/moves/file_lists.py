"""Finds the blocks of a store's files that may have changed between two moments, without reading them.

A writer makes the generations of its rows odd before the first byte and even after the last, and a committed version
of weights is never written again. All other files count as changed.

The checksums of rows (``watermark``) go along, so that damage of this server's disk is found at the next one too. A row
is compared with its checksum only while it has the generation that is beside it. So checksums that are older than the
rows do no harm, and a store at rest does not wait until they are read again. Those of another structure are left out:
the next sync replaces their file, and blocks of both would look alike.

``server/README.md`` has reading orders of checkpoints and moves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES, count_blocks, pack_changed
from tdserve.server.catalog.seals import Seal
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.version_files import make_path
from tdserve.store.durability.watermark import FILE_NAME as SYNCED_FILE, SyncedStore, has_record
from tdserve.store.roots.moved_files import list_files
from tdserve.store.values.object_folders import is_of_values
from tdserve.store.weights.version_names import make_values_name
from tdserve.v1 import control_pb2

_SUMS = SYNCED_FILE.encode()

_KINDS_OF_ROWS = ("tensordict", "replay")
"""Kinds of stores whose rows have generations; those of a keyed store name other things."""


@dataclass(frozen=True)
class ContentMark:
    """What a store's files were at one moment, as far as others can be compared with it.

    Attributes:
        identity: Identity of the store and its structure.
        sizes: Sizes of all files, by path.
        generations: Generations of the rows; None if their files are not compared by rows.
        row_nbytes: Bytes of a row in each file of rows.
        versions: Files of committed versions.
    """

    identity: str
    sizes: Mapping[bytes, int]
    generations: NDArray[np.int64] | None
    row_nbytes: Mapping[bytes, int]
    versions: frozenset[bytes]

    @classmethod
    def of(cls, store: OpenedStore, generations: NDArray[np.int64] | None, *, with_values: bool = True) -> ContentMark:
        """Makes the mark of a store; blocking. What is read of its files from now on is compared with this.

        Args:
            generations: Generations of its rows; None if they do not tell all that changes.
            with_values: Whether files of non-tensor values are among its files.
        """
        record, row_nbytes, copied, has_sums = store.record, {}, None, False
        if generations is not None:
            copied = generations[: record.num_rows].copy()  # before the files are listed
            described = SyncedStore.from_spec(
                store.spec, uid=record.uid, folder=str(store.folder), structure=record.structure
            )
            row_nbytes = {os.fsencode(path): nbytes for path, nbytes in described.leaves}
            has_sums = has_record(described)
        sizes = list_files(store.folder)
        if not has_sums:
            sizes.pop(_SUMS, None)
        if not with_values:
            sizes = {path: nbytes for path, nbytes in sizes.items() if not is_of_values(path)}
        return cls(store.identity, sizes, copied, row_nbytes, frozenset(_list_version_files(store)))

    def list_changed(self, before: ContentMark | None, *, is_at_rest: bool) -> list[bytes]:
        """Lists the blocks of each file that may have changed since an earlier mark.

        Args:
            is_at_rest: Whether clients wait, so that older checksums of rows do.

        Returns:
            One entry for each of ``sizes``: a bit for each block of ``MAX_BLOCK_BYTES``, that of the first block
            lowest; empty if all may have changed.
        """
        if before is None or before.identity != self.identity:
            return [b""] * len(self.sizes)
        rows = self._find_changed_rows(before)
        kept = (self.versions & before.versions) | ({_SUMS} if is_at_rest else set())
        return [self._mark_blocks(path, nbytes, before, rows, kept) for path, nbytes in self.sizes.items()]

    def _find_changed_rows(self, before: ContentMark) -> NDArray[np.int64] | None:
        now, then = self.generations, before.generations
        if now is None or then is None or len(now) != len(then):
            return None
        return np.flatnonzero((now != then) | (then % 2 == 1))

    def _mark_blocks(
        self, path: bytes, nbytes: int, before: ContentMark, rows: NDArray[np.int64] | None, kept: AbstractSet[bytes]
    ) -> bytes:
        if before.sizes.get(path) != nbytes or not nbytes:
            return b""
        if path in kept:
            return pack_changed(np.zeros(count_blocks(nbytes), np.bool_))
        row_nbytes = self.row_nbytes.get(path)
        if rows is None or not row_nbytes:
            return b""
        num_blocks = count_blocks(nbytes)
        first = rows * row_nbytes // MAX_BLOCK_BYTES
        last = (rows * row_nbytes + row_nbytes - 1) // MAX_BLOCK_BYTES
        begun = np.bincount(first, minlength=num_blocks + 1) - np.bincount(last + 1, minlength=num_blocks + 1)
        return pack_changed(np.cumsum(begun)[:num_blocks] > 0)


class FileLists:
    """Lists the files of stores for their readers, and remembers a mark of each list."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, str], tuple[str, ContentMark]] = {}  # by session and store

    async def list_files(
        self, store: OpenedStore, by: Seal, *, with_values: bool = True, is_at_rest: bool = False
    ) -> control_pb2.FileSizes:
        """Returns the files of a store with their sizes, and which of their blocks may have changed since the list
        before of the same reader.

        Args:
            by: The reader.
            with_values: Whether files of non-tensor values are among them.
            is_at_rest: Whether clients wait until this reader has read what has changed.
        """
        generations, before = _find_generations(store), self._find_mark(store.name, by)
        mark = await asyncio.to_thread(ContentMark.of, store, generations, with_values=with_values)
        changed = await asyncio.to_thread(mark.list_changed, before, is_at_rest=is_at_rest)
        self._marks[by.session, store.name] = by.operation, mark
        return _make_list(mark, changed)

    def begin_compare(self, stores: Iterable[OpenedStore], by: Seal) -> Callable[[], list[control_pb2.FileSizes]]:
        """Returns a function for any thread: it returns the list of each of some stores at rest, without files of
        values. The next lists are not compared with these."""
        compared = [(store, _find_generations(store), self._find_mark(store.name, by)) for store in stores]

        def compare() -> list[control_pb2.FileSizes]:
            found = []
            for store, generations, before in compared:
                mark = ContentMark.of(store, generations, with_values=False)
                found.append(_make_list(mark, mark.list_changed(before, is_at_rest=True)))
            return found

        return compare

    def has_listed(self, name: str, by: Seal) -> bool:
        """Returns whether a reader has listed the files of a store of this name."""
        return self._find_mark(name, by) is not None

    def _find_mark(self, name: str, by: Seal) -> ContentMark | None:
        reader, mark = self._marks.get((by.session, name), ("", None))
        return mark if reader == by.operation else None

    def forget(self, by: Seal, name: str) -> None:
        """Forgets what a session has listed of a store."""
        self._marks.pop((by.session, name), None)

    def forget_session(self, session: int) -> None:
        """Forgets all that a session has listed."""
        for listed in [key for key in self._marks if key[0] == session]:
            del self._marks[listed]


def _make_list(mark: ContentMark, changed: list[bytes]) -> control_pb2.FileSizes:
    return control_pb2.FileSizes(paths=mark.sizes.keys(), nbytes=mark.sizes.values(), changed=changed)


def _find_generations(store: OpenedStore) -> NDArray[np.int64] | None:
    """Returns the generations by which a store's files are compared, a view; None if they do not tell all."""
    if store.generations is None or store.record.kind not in _KINDS_OF_ROWS or store.is_filling or store.is_hidden:
        return None
    return store.generations.values


def _list_version_files(store: OpenedStore) -> Iterator[bytes]:
    for record in store.versions.kept if store.versions is not None else ():
        path = make_path(store, record.version)
        for each in (path, make_values_name(path)):
            yield os.fsencode(each.relative_to(store.folder))
