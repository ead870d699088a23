"""One pass that syncs stores to the disk, in an order that is safe against a loss of power at any moment.

First it copies the catalog as of one moment, then it syncs and records every store's rows and versions, then the copy
replaces the previous one. So everything that the copy lists has reached the disk before it.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tdserve.base.errors import ClosedError, CorruptDataError, TDServeError
from tdserve.store.database import environments
from tdserve.store.database.environments import DATA_FILE, find_damage
from tdserve.store.disk.faults import convert_os_errors, lmdb_faults
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.durability.environment_scan import DamagedRecord, scan_here
from tdserve.store.durability.record_copy import put_back_whole
from tdserve.store.durability.watermark import SyncedStore, sync_store
from tdserve.store.weights.version_marks import sync_versions

FOLDER = "synced"
"""Name of that folder in the root."""

COPY_FILE = "catalog.mdb"
"""Name of the copy in the folder of synced files."""


_damaged: dict[Path, tuple[DamagedRecord, ...]] = {}
"""Records of a catalog that were damaged when this process first copied it, by its folder."""


@dataclass(frozen=True)
class SyncedWeights:
    """Versions of one weights store to sync.

    Attributes:
        uid: Incarnation of the store.
        folder: Folder of the version files.
        records: Record of each version, by its number; opaque.
    """

    uid: str
    folder: str
    records: Mapping[int, str]


@dataclass(frozen=True)
class Pass:
    """What to sync.

    Attributes:
        catalog: Folder of the catalog.
        target: Folder of synced files.
        stores, weights: Stores that may have changed since the last pass.
        is_all: Whether the lists are complete; otherwise a request waits for this pass.
    """

    catalog: str
    target: str
    stores: Sequence[SyncedStore] = ()
    weights: Sequence[SyncedWeights] = ()
    is_all: bool = False

    def run(self, is_over: Callable[[], bool] = lambda: False) -> dict[str, str]:
        """Makes the pass; blocks for the disk.

        Args:
            is_over: Called before each store; returns whether no caller waits for the pass any more.

        Returns:
            The reason for each store that was not synced, by uid; all others were.

        Raises:
            ClosedError: It was over before its end; the previous copy of the catalog stays.
            TDServeError: The catalog could not be copied; the previous copy stays.
        """
        target = Path(self.target)
        with convert_os_errors(target):
            target.mkdir(exist_ok=True)
        fresh = target / f"{COPY_FILE}{FRESH_SUFFIX}"
        _copy_catalog(Path(self.catalog), fresh, before=target / COPY_FILE)
        failures = {}
        for store in self.stores:
            _check_wanted(is_over)
            try:
                with convert_os_errors(Path(store.folder)):  # its files go at any moment when it is deleted
                    sync_store(store)
            except TDServeError as error:
                failures[store.uid] = str(error)
        for weights in self.weights:
            _check_wanted(is_over)
            try:
                with convert_os_errors(Path(weights.folder)):
                    sync_versions(Path(weights.folder), weights.records, uid=weights.uid)
            except TDServeError as error:
                failures[weights.uid] = str(error)
        with convert_os_errors(target):
            os.replace(fresh, target / COPY_FILE)
        sync_file(target)
        sync_file(target.parent)
        return failures


def _check_wanted(is_over: Callable[[], bool]) -> None:
    if is_over():
        raise ClosedError(what="the server's syncing")


def put_back(target: Path, catalog: Path) -> bool:
    """Replaces the catalog by the copy, after a loss of power; returns whether there is a copy. The old catalog stays
    beside it, under another name."""
    copy = target / COPY_FILE
    with convert_os_errors(copy):
        if not copy.exists():
            return False
        catalog.mkdir(exist_ok=True)
        fresh = catalog / f"{DATA_FILE}{FRESH_SUFFIX}"
        fresh.write_bytes(copy.read_bytes())
        sync_file(fresh)
        if (catalog / DATA_FILE).exists():
            os.replace(catalog / DATA_FILE, catalog / f"{DATA_FILE}.lost")
        (catalog / environments.LOCK_FILE).unlink(missing_ok=True)
        os.replace(fresh, catalog / DATA_FILE)
    sync_file(catalog)
    return True


def _copy_catalog(folder: Path, target: Path, *, before: Path) -> None:
    """Copies the catalog.

    A record that this process has found damaged in the catalog's first copy is taken from the copy before as long as
    it is: it would be the last whole one.
    """
    environment = environments.acquire(folder, writable=False, max_bytes=0)
    try:
        with lmdb_faults(target, max_bytes=environment.max_bytes):
            environment.write_copy(target)
    finally:
        environments.release(environment)
    if folder not in _damaged:
        _damaged[folder] = scan_here(target).damaged
    if _damaged[folder] and before.exists() and not find_damage(before):
        with suppress(CorruptDataError):
            put_back_whole(target, before, _damaged[folder])
