"""Checks the environments of LMDB: the catalog's records, values of rows, and entries of keyed stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tdserve.rules.catalog import StoreRecord
from tdserve.server.checking.findings import CheckedRoot, Finding
from tdserve.server.checking.repair_process import run_apart
from tdserve.server.checking.row_repairs import drop_entries, drop_values, find_row
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.durability.environment_scan import OUT_OF_ORDER, DamagedRecord
from tdserve.store.durability.record_copy import copy_records
from tdserve.store.values.entry_tables import TABLES
from tdserve.store.values.object_rows import NAME_BYTES, make_name
from tdserve.store.values.objects import Objects
from tdserve.store.values.value_copy import ValueCopy
from tdserve.structure.trees.tree import Spec

WRITE_AGAIN = "write these values again, or restore a checkpoint"


def check_values(checked: CheckedRoot, record: StoreRecord, stored: Spec, folder: Path) -> Iterator[Finding]:
    """Yields the damaged values of a store.

    Args:
        folder: Folder of its values, which need not exist.
    """
    name = checked.get_name(folder / DATA_FILE)
    changed = checked.changed.pop(name, "")
    if not Objects.exists(folder):
        if changed:
            yield Finding(name, changed, record.name, remedy=WRITE_AGAIN)
        return
    if name in checked.misleading:
        return
    found = checked.scanner.scan(folder / DATA_FILE)
    if found.broken_page and all(each.reason == OUT_OF_ORDER for each in found.damaged):
        found = replace(found, damaged=())  # they are only not found in these pages
    checked.add_bytes((folder / DATA_FILE).stat().st_size)
    copy = ValueCopy(checked.root.store_folder(record.name))
    is_damaged = bool(found.failure or found.damaged)
    if is_damaged and (changed or copy.is_of(folder)) and _is_whole(checked, copy):
        reason = found.failure or f"{len(found.damaged)} damaged records"
        yield Finding(name, reason, record.name, repair=partial(copy.put_back, folder))
        return
    if found.failure:
        yield Finding(name, found.failure, record.name, remedy="restore the store from a checkpoint, or delete it")
    else:
        yield from _list_entries(record, name, folder, [each for each in found.damaged if each.table in TABLES])
        of_rows = [each for each in found.damaged if each.table not in TABLES]
        yield from _list_rows(checked, record, stored, name, of_rows)
    if (changed or found.broken_page) and not is_damaged:
        what = found.broken_page or f"{changed}, in a page without records or in one that leads to others"
        reason = f"{what}; every record found is whole"
        repair = partial(run_apart, partial(copy_records, folder), path=name)
        yield Finding(name, reason, record.name, repair=repair)


def _is_whole(checked: CheckedRoot, copy: ValueCopy) -> bool:
    """Returns whether the last sync's copy of a store's values is there, and as that sync has left it."""
    path = copy.folder / DATA_FILE
    if not copy.exists or checked.get_name(path) in checked.changed:
        return False
    found = checked.scanner.scan(path)
    return not (found.failure or found.damaged or found.broken_page)


def _list_entries(record: StoreRecord, name: str, folder: Path, damaged: Sequence[DamagedRecord]) -> Iterator[Finding]:
    if damaged:
        found = [each for each in damaged if each.key]
        shown = ", ".join(f"{each.key[:40].decode('utf-8', 'replace')!r} of {each.table}" for each in found[:8])
        more = ", ..." if len(found) > 8 else ""
        missing = [each for each in damaged if not each.key]
        reasons = [f"of the table {each.table!r} {each.reason}" for each in missing]
        reasons += [f"{len(found)} damaged records: {shown}{more}"] if found else []
        num_missing = sum(each.num_records for each in missing if each.table == "entries")
        repair = partial(run_apart, partial(drop_entries, folder, record, num_missing), path=name)
        yield Finding(name, "; ".join(reasons), record.name, repair=repair)


def _list_rows(
    checked: CheckedRoot, record: StoreRecord, stored: Spec, name: str, damaged: Sequence[DamagedRecord]
) -> Iterator[Finding]:
    found = [find_row(each, stored) for each in damaged]
    others = found.count(None)
    rows = sorted({row for row in found if row is not None})
    if rows:
        repair = partial(run_apart, partial(drop_values, checked.root, record, stored), path=name)
        yield Finding(name, "damaged values", record.name, rows, repair=repair)
    if others:
        names = {each.key[:NAME_BYTES] for each in damaged}
        common = [path for path, _ in stored.values if make_name(path) in names]
        of = f" of key {'.'.join(common[0])!r}" if common else ""
        yield Finding(name, f"{others} damaged records{of}, which several rows use", record.name, remedy=WRITE_AGAIN)
