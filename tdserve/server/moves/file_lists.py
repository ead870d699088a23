"""Finds the blocks of a store's files that may have changed between two moments, without reading them.

Whoever writes rows makes their generations odd before the first byte and even after the last, and a committed version
of weights is never written again. All other files count as changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.server.opened_store import OpenedStore
from tdserve.server.seals import Seal
from tdserve.server.weights.version_files import make_path
from tdserve.store.moved_files import MAX_BLOCK_BYTES, list_files
from tdserve.store.version_names import make_values_name
from tdserve.store.watermark import SyncedStore
from tdserve.v1 import control_pb2

_KINDS_OF_ROWS = ("tensordict", "replay")
"""Kinds of stores whose rows have generations; those of a keyed store name other things."""


@dataclass(frozen=True)
class ContentMark:
    """What a store's files were at one moment, as far as others can be compared with it.

    Attributes:
        identity: Of the store and its structure.
        sizes: Of all files, by path.
        generations: Of the rows; None if their files are not compared by rows.
        row_nbytes: Bytes of a row in each file of rows.
        versions: Files of committed versions.
    """

    identity: str
    sizes: Mapping[bytes, int]
    generations: NDArray[np.int64] | None
    row_nbytes: Mapping[bytes, int]
    versions: frozenset[bytes]

    @classmethod
    def of(cls, store: OpenedStore, generations: NDArray[np.int64] | None) -> ContentMark:
        """Makes the mark of a store; blocking. What is read of its files from now on is compared with this.

        Args:
            generations: Of its rows; None if they do not tell all that changes.
        """
        record, row_nbytes, copied = store.record, {}, None
        if generations is not None:
            copied = generations[: record.num_rows].copy()  # before the files are listed
            described = SyncedStore.from_spec(
                store.spec, uid=record.uid, folder=str(store.folder), structure=record.structure
            )
            row_nbytes = {os.fsencode(path): nbytes for path, nbytes in described.leaves}
        return cls(store.identity, list_files(store.folder), copied, row_nbytes, frozenset(_list_version_files(store)))

    def list_changed(self, before: ContentMark | None) -> list[bytes]:
        """Lists the blocks of each file that may have changed since an earlier mark.

        Returns:
            One entry for each of ``sizes``: a bit for each block of ``MAX_BLOCK_BYTES``, that of the first block
            lowest; empty if all may have changed.
        """
        if before is None or before.identity != self.identity:
            return [b""] * len(self.sizes)
        rows = self._find_changed_rows(before)
        return [self._mark_blocks(path, nbytes, before, rows) for path, nbytes in self.sizes.items()]

    def _find_changed_rows(self, before: ContentMark) -> NDArray[np.int64] | None:
        now, then = self.generations, before.generations
        if now is None or then is None or len(now) != len(then):
            return None
        return np.flatnonzero((now != then) | (then % 2 == 1))

    def _mark_blocks(self, path: bytes, nbytes: int, before: ContentMark, rows: NDArray[np.int64] | None) -> bytes:
        if before.sizes.get(path) != nbytes or not nbytes:
            return b""
        if path in self.versions & before.versions:
            return _pack(np.zeros(_count_blocks(nbytes), np.bool_))
        row_nbytes = self.row_nbytes.get(path)
        if rows is None or not row_nbytes:
            return b""
        num_blocks = _count_blocks(nbytes)
        first = rows * row_nbytes // MAX_BLOCK_BYTES
        last = (rows * row_nbytes + row_nbytes - 1) // MAX_BLOCK_BYTES
        begun = np.bincount(first, minlength=num_blocks + 1) - np.bincount(last + 1, minlength=num_blocks + 1)
        return _pack(np.cumsum(begun)[:num_blocks] > 0)


class FileLists:
    """Lists the files of stores for their readers, and remembers a mark of each list."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, str], tuple[str, ContentMark]] = {}  # by session and store

    async def list_files(self, store: OpenedStore, by: Seal) -> control_pb2.FileSizes:
        """Returns the files of a store with their sizes, and which of their blocks may have changed since the list
        before of the same reader."""
        mark = await asyncio.to_thread(ContentMark.of, store, _find_generations(store))
        reader, before = self._marks.get((by.session, store.name), ("", None))
        changed = await asyncio.to_thread(mark.list_changed, before if reader == by.move else None)
        self._marks[by.session, store.name] = by.move, mark
        return control_pb2.FileSizes(paths=mark.sizes.keys(), nbytes=mark.sizes.values(), changed=changed)

    def forget(self, by: Seal, name: str) -> None:
        """Forgets what a session has listed of a store."""
        self._marks.pop((by.session, name), None)

    def forget_session(self, session: int) -> None:
        """Forgets all that a session has listed."""
        for listed in [key for key in self._marks if key[0] == session]:
            del self._marks[listed]


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


def _count_blocks(nbytes: int) -> int:
    return -(-nbytes // MAX_BLOCK_BYTES)


def _pack(changed: NDArray[Any]) -> bytes:
    return np.packbits(changed, bitorder="little").tobytes()
