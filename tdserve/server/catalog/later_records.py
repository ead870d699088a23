"""Finds stores whose folder has a later record of them than the catalog, as beside a catalog of an earlier moment.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tdserve.base.errors import CorruptDataError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.moments import read_moments
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.recovery.draw_records import list_draw_records
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.record_file import FILE_NAME, KeptRecord
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations, read_structure

_COUNTS = {"inserts": "rows written", "samples": "rows sampled"}
"""What is counted in the state of a table, and shown; other counts change with these."""

OTHER_STRUCTURE_REMEDY = (
    "put back the store's folder and the catalog of one moment, restore the store from a checkpoint, or delete it"
)
"""What to do with a store whose folder alone is of another moment."""


@dataclass(frozen=True)
class LaterRecord:
    """What a folder has on record of its own store, where the catalog's record is of another one or earlier.

    Attributes:
        record: The folder's.
        what: What of it is later, in words; "" if it is another store.
    """

    record: StoreRecord
    what: str = ""


def find_later(folder: Path, record: StoreRecord, db: CatalogDB) -> LaterRecord | None:
    """Returns what a folder has on record of its own store, if the catalog's record is of another one, perhaps of an
    earlier incarnation, or of an earlier moment; None if it is not.

    Args:
        folder: Folder of the store of this name.
        record: The catalog's.
        db: The catalog.
    """
    try:
        kept = KeptRecord.load(folder)
        own = None if kept is None else StoreRecord.from_bytes(kept.record)
        if kept is None or own is None or not is_of(folder, own):
            return None
    except TDServeError:
        return None
    is_without_files = record.packed or record.loading
    if own.uid != record.uid:
        # Of a store that was deleted a killed server may have left the folder.
        is_later = not is_without_files or own.name != record.name or own.created_s > record.created_s
        return LaterRecord(own) if is_later else None
    if is_without_files or own.structure > record.structure:
        return LaterRecord(own, "its keys" if own.structure > record.structure else "its files")
    what = "" if read_moments(db).has(kept.moment) else ", ".join(_list_later(kept, own, record, db))
    return LaterRecord(own, what) if what else None


def check_folder(folder: Path, record: StoreRecord, db: CatalogDB) -> None:
    """Checks that a store's folder is of the catalog's moment.

    Call it before the store is opened: what the catalog does not know of might be removed then. After it, nothing that
    the catalog has later of this store is taken for something earlier.

    Raises:
        CorruptDataError: Its record is of a later moment than the catalog, or its files have another structure.
    """
    _refuse_later(folder, record, db)
    if (found := find_other_structure(folder, record, db)) is not None:
        raise CorruptDataError(
            path=str(folder / GENERATION_FILE),
            expected=f"structure {record.structure}, which the catalog has",
            actual=f"structure {found}, of another moment; {OTHER_STRUCTURE_REMEDY}",
        )


def find_other_structure(folder: Path, record: StoreRecord, db: CatalogDB) -> int | None:
    """Returns the number of the structure that the files of a store have, if it is neither the catalog's nor about to
    become that; None if it is, or that is unknown. Raises CorruptDataError if what is about to change is damaged."""
    if record.packed or KINDS[record.kind].has_versions:
        return None
    try:
        found = read_structure(folder / GENERATION_FILE)
    except TDServeError:  # opening the file reports what is wrong
        return None
    is_changing = found != record.structure and db.get("pending", Restructured.make_key(record.uid)) is not None
    return None if found == record.structure or is_changing else found


def _refuse_later(folder: Path, record: StoreRecord, db: CatalogDB) -> None:
    """Raises CorruptDataError if the record in a store's folder is of a later moment than the catalog."""
    try:
        kept = KeptRecord.load(folder)
        if kept is None or (moments := read_moments(db)).has(kept.moment):
            return
        own = StoreRecord.from_bytes(kept.record)
    except TDServeError:  # a damaged copy does no harm
        return
    is_same = own.uid == record.uid and not record.packed
    what = ", ".join(_list_later(kept, own, record, db)) if is_same else "all of it"
    if what:
        raise CorruptDataError(
            path=str(folder / FILE_NAME),
            expected="nothing that the catalog has not had",
            actual=f"a later moment ({what}); the catalog is of an earlier one: end the server, and use check --repair",
        )
    with suppress(TDServeError):  # without room the catalog has none for later changes either
        replace(kept, moment=moments.last).save(folder)


def is_of(folder: Path, record: StoreRecord) -> bool:
    """Returns whether a folder is of this record, and has files of its structure. Raises CorruptDataError."""
    kind = KINDS.get(record.kind)
    if kind is None or not kind.is_folder_of(folder, record):
        return False
    if kind.has_versions:
        return True
    generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
    is_current = generations.is_current(record.structure)
    generations.close()
    return is_current


def _list_later(kept: KeptRecord, own: StoreRecord, record: StoreRecord, db: CatalogDB) -> Iterator[str]:
    """Yields what the copy of a record has that the catalog has not, in words; nothing if both have the same."""
    if own.structure != record.structure:
        yield "its keys"
    elif own != record:
        yield "its settings"
    state = db.get("states", record.uid.encode()) or b""
    if state != kept.state:
        yield from _compare_states(json.loads(kept.state or b"{}"), json.loads(state or b"{}"))
    before = list_draw_records(db, record.uid)
    if kept.draws is not None and (num_draws := len(set(kept.draws).difference(before))):
        yield f"{num_draws} draws for ranks"


def _compare_states(later: dict[str, Any], earlier: dict[str, Any]) -> Iterator[str]:
    """Yields how the later state of a store's rules differs."""
    is_named = False
    for key, what in _COUNTS.items():
        if (count := later.get(key, 0)) != (before := earlier.get(key, 0)):
            yield f"{what}: {count} instead of {before}"
            is_named = True
    newest, before = (max((kept[0] for kept in each.get("kept", ())), default=0) for each in (later, earlier))
    if newest != before:
        yield f"version {newest} instead of {before}"
    elif not is_named:
        yield "counts or settings"
