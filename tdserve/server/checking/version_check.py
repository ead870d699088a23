"""Checks the versions of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tdserve.base.errors import TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.checking.findings import REMOVED, CheckedRoot, Finding
from tdserve.server.kinds.store_kind import load_state
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root
from tdserve.store.weights.version_marks import (
    FILE_NAME as MARKS_FILE,
    check_marks,
    compute_checksum,
    find_marks,
    is_of_version,
)
from tdserve.store.weights.version_names import SUFFIX, discard


def check_versions(checked: CheckedRoot, record: StoreRecord) -> Iterator[Finding]:
    """Yields the versions that are damaged, and the files of weights that are."""
    folder = checked.root.store_folder(record.name) / "versions"
    state = load_state(checked.db, record.uid)
    marks_name = checked.get_name(folder / MARKS_FILE)
    changed = checked.changed.pop(marks_name, "")
    try:
        check_marks(folder)
    except TDServeError as error:
        yield Finding(marks_name, str(error), record.name, repair=partial(_remove_marks, folder / MARKS_FILE))
        return
    if changed:
        yield Finding(marks_name, changed, record.name, repair=partial(_remove_marks, folder / MARKS_FILE))
    marks = find_marks(folder, record.uid)
    orders = dict(state.get("orders", ()))
    kept = [(kept[0], json.dumps([kept, orders.get(kept[0], "")])) for kept in state.get("kept", ())]
    damaged = dict[int, str]()
    for number, text in kept:
        path = folder / f"{number}{SUFFIX}"
        known = marks.get(str(number))
        try:
            found = compute_checksum(path)
        except TDServeError as error:
            damaged[number] = str(error)
            continue
        if not found:
            damaged[number] = "there is no such file"
        elif known is None or not is_of_version(known[0], text):
            checked.progress.num_unsummed_versions += 1
        elif known[1] != found:
            damaged[number] = f"checksum {found} instead of {known[1]}"
        checked.add_bytes(path.stat().st_size if found else 0)
    whole = [number for number, _ in kept if number not in damaged]
    for number, reason in damaged.items():
        path = folder / f"{number}{SUFFIX}"
        if whole:
            repair = partial(_drop_version, checked.root, record, number, is_newest=number > max(whole))
            yield Finding(checked.get_name(path), f"version {number}: {reason}", record.name, repair=repair)
        else:
            remedy = "no other version is whole: publish again, after which --repair removes it, or delete the store"
            yield Finding(checked.get_name(path), f"version {number}: {reason}", record.name, remedy=remedy)


def _remove_marks(path: Path) -> str:
    path.unlink(missing_ok=True)
    return REMOVED


def _drop_version(root: Root, record: StoreRecord, number: int, *, is_newest: bool) -> str:
    with CatalogDB(root.catalog_folder) as db:
        state = load_state(db, record.uid)
        state["kept"] = [kept for kept in state["kept"] if kept[0] != number]
        state["orders"] = [each for each in state["orders"] if each[0] != number]
        state["checksums"] = [each for each in state.get("checksums", ()) if each[0] != number]
        db.put("states", record.uid.encode(), json.dumps(state).encode())
    discard(root.store_folder(record.name) / "versions" / f"{number}{SUFFIX}")
    return "it was dropped, and an older one is the newest" if is_newest else "it was dropped"
