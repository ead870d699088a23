"""Checks a store with rows: its files, generations, values and rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.checking.findings import CheckedRoot, Finding
from tdserve.server.checking.row_repairs import (
    drop_rows,
    remove_synced,
    resize,
    restore_generations,
    write_text,
)
from tdserve.server.checking.value_check import check_values
from tdserve.store import object_folders
from tdserve.store.adopted import check_adopted
from tdserve.store.format import Folder, plan
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.row_columns import FOLDER as COLUMNS_FOLDER
from tdserve.store.value_copy import NAME as COPY_FOLDER, ValueCopy
from tdserve.store.watermark import FILE_NAME as SYNCED_FILE, SUMMED_COLUMNS, SyncedStore, Watermark
from tdserve.structure.tree import Spec

_BYTES_AT_ONCE = 1 << 26

_SUMMED_FILES = frozenset(f"{COLUMNS_FOLDER}/{name}.memmap" for name in SUMMED_COLUMNS)

UNSURE = (
    "what it has of each row may be wrong: set priorities again by update_priority, or restore a checkpoint; the next "
    "server takes the file as it is"
)


def check_rows(checked: CheckedRoot, record: StoreRecord, stored: Spec) -> Iterator[Finding]:
    """Yields what is wrong with a store that has files of rows.

    Args:
        stored: Structure of its files.
    """
    folder = checked.root.store_folder(record.name)
    if record.adopted:
        try:
            check_adopted(folder, stored)
        except TDServeError as error:
            yield Finding(checked.get_name(folder), str(error), record.name, remedy=f"look at {record.adopted}")
    else:
        yield from check_files(checked, record, stored, folder)
    try:
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
    except TDServeError as error:
        repair = partial(restore_generations, folder, record, stored)
        yield Finding(checked.get_name(folder / GENERATION_FILE), str(error), record.name, repair=repair)
        return
    if generations.structure != record.structure:
        reason = "the last change of its keys was not finished"
        yield Finding(checked.get_name(folder), reason, record.name, remedy="start a server: it finishes it")
        return
    is_summed = True
    for finding in _check_changed(checked, record, stored, folder):
        is_summed &= not finding.path.endswith(SYNCED_FILE)
        yield finding
    values = object_folders.get_folder(folder, generations.objects_epoch)
    bad_rows = set[int]()
    for finding in check_values(checked, record, stored, values):
        bad_rows.update(finding.rows)
        is_summed &= bool(finding.rows)
        yield finding
    is_summed = is_summed and not record.adopted
    if is_summed and not any(_differs(folder / name, nbytes) for name, nbytes in list_sizes(stored)):
        yield from _check_sums(checked, record, stored, generations, bad_rows)
    generations.close()


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
        if _differs(path, nbytes):
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            reason, repair = f"{found} instead of {nbytes} bytes", partial(resize, path, nbytes)
            yield Finding(checked.get_name(path), reason, record.name, repair=repair)


def _differs(path: Path, nbytes: int) -> bool:
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
            repair = partial(restore_generations, folder, record, stored)
            yield Finding(name, reason, record.name, repair=repair)
        elif own == SYNCED_FILE or own.startswith(COPY_FOLDER):
            repair = partial(remove_synced, folder / own)
            yield Finding(name, f"{reason}; it is a copy of what is elsewhere", record.name, repair=repair)
        elif own in _SUMMED_FILES:  # that tells which rows are damaged, if any
            yield Finding(name, reason, record.name, repair=lambda: "only rows that are damaged too use it")
        elif not own.startswith(("rows/", "extra/")):
            yield Finding(name, reason, record.name, remedy=UNSURE)


def _check_sums(
    checked: CheckedRoot, record: StoreRecord, stored: Spec, generations: Generations, bad_rows: set[int]
) -> Iterator[Finding]:
    """Yields the rows whose content is not that of the last sync, although they were not written since."""
    folder = checked.root.store_folder(record.name)
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    now = generations.values[:-1]
    is_live = (now & 1 == 0) & (now > 0)
    try:
        watermark = Watermark.open(store, makes=False)
    except TDServeError:  # no sync has covered it
        checked.progress.num_unsummed_rows += int(is_live.sum())
        return
    is_summed = is_live & (watermark.generations[:-1] == now)
    checked.progress.num_unsummed_rows += int((is_live & ~is_summed).sum())
    is_summed[sorted(bad_rows)] = False
    rows, copy = np.flatnonzero(is_summed), None
    if store.values:
        copy = ValueCopy(folder)
        copy.folder = object_folders.get_folder(folder, generations.objects_epoch)
    row_nbytes = max(sum(nbytes for _, nbytes in store.leaves), 1)
    step = max(_BYTES_AT_ONCE // row_nbytes, 1)
    found = list[NDArray[np.int64]]()
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        try:
            found.append(some[store.sum_rows(some, copy) != watermark.sums[some]])
        except TDServeError as error:
            yield Finding(checked.get_name(folder), str(error), record.name)
            return
        checked.add_bytes(len(some) * row_nbytes)
    damaged = np.concatenate(found) if found else rows
    if len(damaged):
        numbers = damaged.tolist()
        path = checked.get_name(folder)
        reason = "content, or place in the order of writes, is not what was written"
        yield Finding(path, reason, record.name, numbers, repair=partial(drop_rows, checked.root, record, numbers))
