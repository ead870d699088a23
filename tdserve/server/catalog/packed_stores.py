"""Small stores that were never used: they have no files, and the catalog has their content.

Making and removing five files and folders takes a file system hundreds of times as long as one record. Thousands of
small stores are often made, and many are read once or never. The first use of such a store makes its files, and the
content in the catalog is no longer looked at; it stays there until the files have reached the disk.
"""

from __future__ import annotations

import math
import shutil

import numpy as np

from tdserve.base.errors import CorruptDataError, RemoteProtocolError
from tdserve.messages.content import write_layout
from tdserve.rules.catalog import Catalog, StoreRecord
from tdserve.server.catalog.former_versions import FormerVersions
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.placement_kind import find_last_elsewhere
from tdserve.server.kinds.row_files import make_files
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.store.roots.root import Root
from tdserve.store.values.object_folders import get_folder
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import control_pb2
from tdserve.values.value_columns import decode_block

PACKED_VERSION = 1
"""Content version of a packed store that has content, above the former one."""

MAX_PACKED_TOTAL_BYTES = 1 << 28
"""Space in the catalog, which has a GiB, from which on new stores get their files at once."""

_WITHOUT_CONTENT, _WITH_CONTENT = b"\0", b"\1"
"""What is kept of a store of zeros, and in front of the content of another."""


class PackedStores:
    """The content of packed stores.

    Args:
        root: The acquired root.
        db: Its catalog.
        specs: Structures of the stores.
        former: The last versions of deleted stores.
    """

    def __init__(self, root: Root, db: CatalogDB, specs: Specs, former: FormerVersions) -> None:
        self._root = root
        self._db = db
        self._specs = specs
        self._former = former
        self._unpacked: set[str] = set()  # uids of stores whose files may not have reached the disk yet

    def restore(self, catalog: Catalog) -> None:
        """Forgets content of stores that are gone, after a restart."""
        for key in self._db.list_keys("packed"):
            name = catalog.find_name(key.decode())
            if name is None:
                self._db.delete_later("packed", key)
            elif not catalog.get(name, with_loading=True).packed:
                self._unpacked.add(key.decode())

    def put(self, record: StoreRecord, content: bytes | None, txn: Transaction) -> None:
        """Records a store and its content, the result of ``make_content``; None for zeros."""
        txn.put("stores", record.name.encode(), record.to_bytes())
        txn.put("packed", record.uid.encode(), _WITHOUT_CONTENT if content is None else _WITH_CONTENT + content)

    @property
    def is_full(self) -> bool:
        """Whether the catalog has so much content that the next store should get its files at once."""
        return self._db.count_bytes("packed") > MAX_PACKED_TOTAL_BYTES

    def get_version(self, record: StoreRecord) -> int:
        """Returns the content version of a packed store."""
        return record.former_version + PACKED_VERSION if has_content(self._db, record) else 0

    def delete(self, record: StoreRecord, txn: Transaction) -> None:
        """Deletes what is recorded of a store; its last version stays on record."""
        self._former.note(record.name, max(self.get_version(record), find_last_elsewhere(record)), txn)
        txn.delete("stores", record.name.encode())
        txn.delete("packed", record.uid.encode())
        txn.show(lambda: self._remove_files(record))

    def unpack(self, record: StoreRecord) -> StoreRecord:
        """Makes the files of a store; returns its new record. A crash in the middle leaves it packed.

        Raises:
            CapacityError: The disk is full. The store stays packed.
            CorruptDataError: The catalog lacks its content.
        """
        content = self._db.get("packed", record.uid.encode())
        if not content:
            raise CorruptDataError(path="catalog", expected=f"the content of store {record.name!r}", actual="none")
        folder = self._root.store_folder(record.name)
        stored = KINDS[record.kind].make_stored_spec(record, self._specs.get(record.fingerprint, record.order))
        contents, values = _split(content[1:], stored) if content[:1] == _WITH_CONTENT else (None, b"")
        self._remove_files(record)
        unpacked = record.with_files()
        try:
            make_files(folder, stored, record, contents=contents)
            if values:
                with Objects(get_folder(folder, 0), writable=True, max_bytes=record.max_object_bytes) as objects:
                    objects.put_many(_make_columns(stored, values))
            with self._db.begin_transaction(is_decided=True) as txn:  # no later change is on record without this one
                txn.put("stores", record.name.encode(), unpacked.to_bytes())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._unpacked.add(record.uid)
        return unpacked

    def forget_synced(self, uid: str) -> None:
        """Removes the content of a store whose files have reached the disk."""
        if uid in self._unpacked:
            self._unpacked.discard(uid)
            self._db.delete_later("packed", uid.encode())

    def _remove_files(self, record: StoreRecord) -> None:
        """Removes files that a crash, or a loss of power, has left of a store that counts as packed."""
        folder = self._root.store_folder(record.name)
        if folder.exists():
            shutil.rmtree(folder)


def has_content(db: CatalogDB, record: StoreRecord) -> bool:
    """Returns whether the catalog has the first content of a store; what it has of a store of zeros does not count."""
    return (db.get("packed", record.uid.encode()) or b"")[:1] == _WITH_CONTENT


def make_content(spec: Spec, sent: control_pb2.Content) -> bytes:
    """Returns the content of a new store as it is kept: the messages of the layout of a write, then the values.

    Raises:
        RemoteProtocolError: The values do not fit the structure.
    """
    _make_columns(spec, sent.values)
    return sent.inline + sent.values


def _make_columns(spec: Spec, values: bytes) -> list[ObjectColumn]:
    block = decode_block(values)
    if len(block) != len(spec.values):
        raise RemoteProtocolError(expected=f"{len(spec.values)} columns of values", received=f"{len(block)}")
    return [
        ObjectColumn.from_block(path, column, np.arange(math.prod(leaf.batch_size)), is_every_row=True)
        for (path, leaf), column in zip(spec.values, block, strict=True)
    ]


def _split(content: bytes, spec: Spec) -> tuple[dict[Path, bytes], bytes]:
    """Returns the bytes of each leaf of a content without large leaves, and those of the values behind them."""
    layout = write_layout(spec)
    found = {slot.path: b"" for slot in layout.slots}
    begin = 0
    for message in layout.messages:
        for part in message.parts:
            start = begin + part.offset
            found[layout.slots[part.slot].path] += content[start : start + part.stop - part.start]
        begin += message.nbytes
    return found, content[begin:]
