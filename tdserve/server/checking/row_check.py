"""Checks a store with rows: its files, generations, values and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from tdserve.base.errors import TDServeError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.row_indexes.row_order import NO_SEQUENCE, to_place
from tdserve.server.catalog.later_records import OTHER_STRUCTURE_REMEDY, find_other_structure
from tdserve.server.checking.findings import CheckedRoot, Finding
from tdserve.server.checking.row_repairs import (
    drop_rows,
    remove_synced,
    resize,
    restore_generations,
    write_text,
)
from tdserve.server.checking.value_check import check_values
from tdserve.server.kinds.store_kind import load_state
from tdserve.store.durability.watermark import (
    FILE_NAME as SYNCED_FILE,
    SUMMED_COLUMNS,
    Column,
    SyncedStore,
    Watermark,
    compute_checksum,
)
from tdserve.store.roots.file_sums import read_sums
from tdserve.store.rows.adopted import check_adopted
from tdserve.store.rows.format import Folder, plan
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.rows.row_columns import FOLDER as COLUMNS_FOLDER
from tdserve.store.rows.row_sums import Sums
from tdserve.store.values import object_folders
from tdserve.store.values.value_copy import NAME as COPY_FOLDER, ValueCopy
from tdserve.structure.trees.tree import Spec

_BYTES_AT_ONCE = 1 << 26

_SUMMED_FILES = frozenset(f"{COLUMNS_FOLDER}/{name}.memmap" for name in SUMMED_COLUMNS)

UNSURE = (
    "what it has of each row may be wrong: set priorities again by update_priority, or restore a checkpoint; the next "
    "server takes the file as it is"
)


UNPROVED = (
    "the checksums of its rows are lost, and some of the rows have changed too: restore a checkpoint; the next server "
    "takes them as they are"
)

OLDER = "put back the files of the catalog's moment, or restore a checkpoint; the next server continues with them"

LATER = "its rows are compared once the rest is repaired, and those that differ are dropped"


def check_rows(checked: CheckedRoot, record: StoreRecord, stored: Spec) -> Iterator[Finding]:
    """Yields what is wrong with a store that has files of rows.

    Args:
        stored: Structure of its files.
    """
    folder = checked.root.store_folder(record.name)
    generations = None
    try:
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
    except TDServeError as error:
        repair = partial(restore_generations, checked.root, record, stored)
        lost = Finding(checked.get_name(folder / GENERATION_FILE), str(error), record.name, repair=repair)
    if generations is not None and generations.structure != record.structure:  # nor do the files fit the catalog then
        checked.drop_changed_below(folder)
        yield _describe_structure(checked, record, folder)
        return
    if record.adopted:
        try:
            check_adopted(folder, stored)
        except TDServeError as error:
            yield Finding(checked.get_name(folder), str(error), record.name, remedy=f"look at {record.adopted}")
    else:
        yield from check_files(checked, record, stored, folder)
    if generations is None:
        yield lost
        return
    sums_name = checked.get_name(folder / SYNCED_FILE)
    damaged_sums = checked.changed.pop(sums_name, "")
    is_summed = True
    values = object_folders.get_folder(folder, generations.objects_epoch)
    bad_rows = set[int]()
    for finding in check_values(checked, record, stored, values):
        bad_rows.update(finding.rows)
        is_summed &= bool(finding.rows)
        yield finding
    yield from _check_changed(checked, record, stored, folder)
    yield from _check_age(checked, record, folder)
    is_summed = is_summed and not record.adopted
    if is_summed and not any(_has_other_size(folder / name, nbytes) for name, nbytes in list_sizes(stored)):
        yield from _check_sums(checked, record, stored, generations, bad_rows, damaged_sums)
    elif damaged_sums:
        yield Finding(sums_name, damaged_sums, record.name, remedy=LATER)
    elif not record.adopted and generations.values[:-1].any():
        yield Finding(
            checked.get_name(folder), "other faults hide whether its rows are whole", record.name, remedy=LATER
        )
    generations.close()


def _describe_structure(checked: CheckedRoot, record: StoreRecord, folder: Path) -> Finding:
    """Returns the finding of a store whose files have another structure than the catalog."""
    found, name = find_other_structure(folder, record, checked.db), checked.get_name(folder)
    if found is None:
        reason = "the last change of its keys was not finished"
        return Finding(name, reason, record.name, remedy="start a server: it finishes it")
    reason = f"its files have structure {found} instead of {record.structure}: they are not of the catalog's moment"
    return Finding(name, reason, record.name, remedy=OTHER_STRUCTURE_REMEDY, is_not_served=True)


def list_sizes(stored: Spec) -> Iterator[tuple[str, int]]:
    """Yields the files of a store's leaves with their sizes."""
    planned = plan(stored)
    for top in filter(None, (planned.rows, planned.extra)):
        yield from ((f"{at}/{name}", leaf.nbytes) for at, each in _walk(top, top.name) for name, _, leaf in each.files)


def _walk(folder: Folder, at: str) -> Iterator[tuple[str, Folder]]:
    yield at, folder
    for child in folder.folders:
        yield from _walk(child, f"{at}/{child.name}")


def check_files(checked: CheckedRoot, record: StoreRecord, stored: Spec, folder: Path) -> Iterator[Finding]:
    """Yields the files of tensors that are missing or have another size, and those of metadata with other content."""
    planned = plan(stored)
    expected = {
        f"{at}/{name}": text
        for top in filter(None, (planned.rows, planned.extra))
        for at, each in _walk(top, top.name)
        for name, text in each.texts
    }
    for name, text in expected.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text:
            repair = partial(write_text, path, text)
            yield Finding(checked.get_name(path), "other metadata than was written", record.name, repair=repair)
    for name, nbytes in list_sizes(stored):
        path = folder / name
        if _has_other_size(path, nbytes):
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            reason, repair = f"{found} instead of {nbytes} bytes", partial(resize, path, nbytes)
            yield Finding(checked.get_name(path), reason, record.name, repair=repair)


def _has_other_size(path: Path, nbytes: int) -> bool:
    return not path.is_file() or path.stat().st_size != nbytes


def _check_changed(checked: CheckedRoot, record: StoreRecord, stored: Spec, folder: Path) -> Iterator[Finding]:
    """Yields the files of a store that have changed since its server ended in order, and have no records."""
    for name in list(checked.changed):
        if not name.startswith(f"stores/{record.name}/"):
            continue
        own = name.split("/", 2)[2]
        if own.endswith("data.mdb") and not own.startswith(COPY_FOLDER):
            continue  # its records tell more
        reason = checked.changed.pop(name)
        if own == GENERATION_FILE:
            restore = partial(restore_generations, checked.root, record, stored)
            yield Finding(name, reason, record.name, repair=restore)
        elif own.startswith(COPY_FOLDER):
            remove = partial(remove_synced, folder / own)
            yield Finding(name, f"{reason}; it is a copy of what is elsewhere", record.name, repair=remove)
        elif own in _SUMMED_FILES:  # that shows which rows are damaged, if any
            yield Finding(name, reason, record.name, repair=lambda: "only rows that are damaged too use it")
        elif not own.startswith(("rows/", "extra/")):
            yield Finding(name, reason, record.name, remedy=UNSURE)


def _check_age(checked: CheckedRoot, record: StoreRecord, folder: Path) -> Iterator[Finding]:
    """Yields that the files of a table are older than the catalog, of a server that did not end in order: otherwise
    their checksums tell. A row has its place in the order of writes before the catalog counts it, and keeps it when it
    leaves, until a newer one takes its place."""
    path = folder / COLUMNS_FOLDER / "sequence.memmap"
    if not record.capacity or checked.root.run.has_ended_in_order() or not path.is_file():
        return
    try:
        state = load_state(checked.db, record.uid)
    except TDServeError:  # which the check of the catalog names
        return
    num_counted = to_place(int(state.get("last_sequence", NO_SEQUENCE)))
    num_there = to_place(_find_highest(path))
    if num_there < num_counted:
        reason = f"its files are older than the catalog: the last {num_counted - num_there} rows written are not there"
        yield Finding(checked.get_name(folder), reason, record.name, remedy=OLDER)


def _find_highest(path: Path) -> int:
    """Returns the highest sequence of a column."""
    highest = NO_SEQUENCE
    with path.open("rb") as file:
        while len(some := np.fromfile(file, "<i8", _BYTES_AT_ONCE // 8)):
            highest = max(highest, int(some.max()))
    return highest


def _check_sums(
    checked: CheckedRoot,
    record: StoreRecord,
    stored: Spec,
    generations: Generations,
    bad_rows: set[int],
    damaged_sums: str,
) -> Iterator[Finding]:
    """Yields the rows whose content is not that of the last sync, although they were not written since.

    Args:
        damaged_sums: What is wrong with the file of their checksums, of a server that ended in order; "": nothing.
            Unless that file would be as it was with the checksums of the rows as they are, those that do not match
            theirs count as damaged: it is unknown which of both is.
    """
    folder = checked.root.store_folder(record.name)
    name = checked.get_name(folder / SYNCED_FILE)
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    now = generations.values[:-1]
    is_summed = (now & 1 == 0) & (now > 0)
    watermark = None
    with suppress(TDServeError):  # no sync has covered it, or it is damaged
        watermark = Watermark.open(store, makes=False)
    if not damaged_sums:
        num_live = int(is_summed.sum())
        is_summed &= False if watermark is None else watermark.generations[:-1] == now
        checked.progress.num_unsummed_rows += num_live - int(is_summed.sum())
    is_summed[sorted(bad_rows)] = False
    rows = np.flatnonzero(is_summed)
    try:
        sums = _compute_sums(checked, store, generations, rows, None if watermark is None else watermark.columns)
    except TDServeError as error:
        yield Finding(checked.get_name(folder), str(error), record.name)
        return
    if damaged_sums:
        is_as_it_was = read_sums(checked.root.path)[name].checksum == compute_checksum(store, generations.values, sums)
        if watermark is None and not is_as_it_was:
            yield Finding(name, damaged_sums, record.name, remedy=UNPROVED)
            return
        reason = f"{damaged_sums}; it is a copy of what is elsewhere"
        yield Finding(name, reason, record.name, repair=partial(remove_synced, folder / SYNCED_FILE))
        if is_as_it_was:
            return
    if watermark is None:
        return
    is_same = (watermark.sums[rows] == sums[rows]) & (watermark.generations[rows] == now[rows])
    if not is_same.all():
        numbers = rows[~is_same].tolist()
        what = "content, checksum, or place" if damaged_sums else "content, or place"
        reason = f"{what} in the order of writes, is not what was written"
        repair = partial(drop_rows, checked.root, record, numbers)
        yield Finding(checked.get_name(folder), reason, record.name, numbers, repair=repair)


def _compute_sums(
    checked: CheckedRoot,
    store: SyncedStore,
    generations: Generations,
    rows: Rows,
    columns: Sequence[Column] | None,
) -> Sums:
    """Returns the checksums of rows as they are; 0 for others."""
    sums: Sums = np.zeros(store.num_rows, np.uint64)
    copy = None
    if store.values:
        copy = ValueCopy(Path(store.folder))
        copy.folder = object_folders.get_folder(Path(store.folder), generations.objects_epoch)
    row_nbytes = max(sum(nbytes for _, nbytes in store.leaves), 1)
    step = max(_BYTES_AT_ONCE // row_nbytes, 1)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        sums[some] = store.sum_rows(some, copy, columns)
        checked.add_bytes(len(some) * row_nbytes)
    return sums
