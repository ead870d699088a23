"""Checks the catalog: each of its records, and that the stores' records lead to what they need."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from tdserve.base.errors import TDServeError
from tdserve.server.checking.catalog_repairs import begin_catalog, put_back_catalog, put_back_records
from tdserve.server.checking.findings import Finding
from tdserve.server.checking.repair_process import run_apart
from tdserve.store.database.catalog_db import Table
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.durability.environment_scan import EnvironmentScanner
from tdserve.store.durability.record_copy import copy_records
from tdserve.store.durability.sync_pass import COPY_FILE
from tdserve.store.roots.record_file import KeptRecord
from tdserve.store.roots.root import Root

_WITHOUT_COPY = (
    "there is no copy of it either: restore a checkpoint into another root (tdserve restore PLACE --root OTHER), "
    "or serve the folders stores/NAME/rows there (tdserve adopt PATH NAME)"
)
"""What to do with stores that no catalog describes."""


def check_catalog(
    root: Root, changed: dict[str, str], misleading: set[str], scanner: EnvironmentScanner
) -> tuple[list[Finding], bool]:
    """Returns what is wrong with the catalog, and whether it can be read at all."""
    path = root.catalog_folder / DATA_FILE
    name = str(path.relative_to(root.path))
    reason = changed.pop(name, "")
    if not path.exists() and not _list_folders(root):
        return [], False  # no server has come so far
    if name in misleading:
        return [], False
    scanned = scanner.scan(path)
    if scanned.failure:
        reason = f"it cannot be read: {scanned.failure}"
        if not (root.synced_folder / COPY_FILE).exists():
            return [_describe_lost(root, name, reason)], False
        return [Finding(name, reason, repair=partial(put_back_catalog, root))], False
    by_table = defaultdict(list)
    for each in scanned.damaged:
        by_table[each.table].append(each.key)
    findings = []
    for table, keys in by_table.items():
        shown = ", ".join(repr(key[:40].decode("utf-8", "backslashreplace")) for key in keys[:8])
        repair = partial(run_apart, partial(put_back_records, root, cast(Table, table), keys), path=name)
        findings.append(Finding(name, f"{len(keys)} damaged records of table {table!r}: {shown}", repair=repair))
    if (reason or scanned.broken_page) and not scanned.damaged:
        what = scanned.broken_page or f"{reason}, in a page without records or in one that leads to others"
        reason = f"{what}; every record is whole"
        findings.append(
            Finding(name, reason, repair=partial(run_apart, partial(copy_records, root.catalog_folder), path=name))
        )
    return findings, True


def _describe_lost(root: Root, name: str, reason: str) -> Finding:
    """Returns the finding of a catalog that is lost, and its copy too: what is left are records in stores' folders."""
    folders = _list_folders(root)
    found = [folder.name for folder in folders if _has_record(folder)]
    if not found:
        return Finding(name, reason, remedy=_WITHOUT_COPY)
    reason += (
        f", and there is no copy of it; {len(found)} of {len(folders)} folders of stores have a record of their own"
    )
    return Finding(name, reason, repair=partial(begin_catalog, root))


def _list_folders(root: Root) -> list[Path]:
    return [folder for folder in root.list_store_folders() if not folder.name.startswith(".")]


def _has_record(folder: Path) -> bool:
    with suppress(TDServeError):
        return KeptRecord.load(folder) is not None
    return False
