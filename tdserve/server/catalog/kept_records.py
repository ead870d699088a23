"""Keeps what the catalog has of each store in its folder too, and makes it a store again from that.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tdserve.base.errors import CorruptDataError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.weights import Versions
from tdserve.server.catalog.later_records import is_of
from tdserve.server.catalog.moments import Moments, read_moments
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.specs import Specs, make_keys
from tdserve.server.recovery.draw_records import find_draw_records, forget_draw_records
from tdserve.store.database.catalog_db import CatalogDB, PinnedCatalog, Transaction
from tdserve.store.durability.sync_pass import Pass
from tdserve.store.roots.record_file import FILE_NAME, MAX_DRAW_BYTES, KeptRecord, KeptSpec
from tdserve.store.roots.root import Root
from tdserve.structure.trees import codec
from tdserve.v1 import spec_pb2

_LOST_DRAWS = "draws that store {!r} kept for ranks: their steps are drawn again, also rows that they had used up"


def keep_records(work: Pass) -> None:
    """Writes what the catalog has of each store of a pass into its folder, as far as it can; the next one tries again.

    A pass for those who wait for the disk writes it only where there is none: else each of their writes would.
    """
    folders = [(uid, folder) for uid, folder in _list_folders(work) if work.is_all or not (folder / FILE_NAME).exists()]
    if not folders:
        return
    with suppress(TDServeError), CatalogDB(work.catalog, is_read_only=True) as db:
        pinned = db.pin()
        try:
            moments = read_moments(pinned)
            for uid, folder in folders:
                with suppress(TDServeError):
                    _keep(pinned, moments, uid, folder)
        finally:
            pinned.close()


def _keep(pinned: PinnedCatalog, moments: Moments, uid: str, folder: Path) -> None:
    """Writes what the catalog has of a store into its folder, unless that is there, or something later is."""
    found, before = _find(pinned, uid, folder.name), None
    if found is None:
        return
    found = replace(found, moment=moments.last)
    with suppress(CorruptDataError):
        before = KeptRecord.load(folder)
    if before is not None:
        is_same = replace(before, moment=found.moment) == found
        if is_same == moments.has(before.moment):
            return  # as it is, or later than the catalog: a check brings that back
    found.save(folder)


def _list_folders(work: Pass) -> Iterator[tuple[str, Path]]:
    yield from ((store.uid, Path(store.folder)) for store in work.stores)
    yield from ((weights.uid, Path(weights.folder).parent) for weights in work.weights)


def _find(pinned: PinnedCatalog, uid: str, name: str) -> KeptRecord | None:
    """Returns what the catalog has of this incarnation of a store; None if it is not all there."""
    content = pinned.get_many("stores", [name.encode()]).get(name.encode())
    record = None if content is None else StoreRecord.from_bytes(content)
    if content is None or record is None or record.uid != uid or record.loading or record.packed:
        return None
    state = pinned.get_many("states", [uid.encode()]).get(uid.encode(), b"")
    named = {(record.fingerprint, record.order)} if record.fingerprint else set()
    if KINDS[record.kind].has_versions and state:
        named |= Versions.restore(json.loads(state)).structures
    keys = {each: make_keys(*each)[-1] for each in named}
    specs = pinned.get_many("specs", keys.values())
    if any(key not in specs for key in keys.values()):
        return None
    draws: tuple[tuple[bytes, bytes], ...] | None = tuple(find_draw_records(pinned, uid).items())
    if sum(len(key) + len(draw) for key, draw in draws or ()) > MAX_DRAW_BYTES:
        draws = None
    return KeptRecord(content, state, tuple(KeptSpec(*each, specs[keys[each]]) for each in sorted(keys)), draws)


def bring_back(root: Root, name: str) -> Sequence[str] | None:
    """Makes a folder the store again that it was at its last pass, whatever the catalog has of its name; returns what
    is lost of it, or None if it could not.

    Raises:
        TDServeError: What its folder has cannot be read.
    """
    folder = root.store_folder(name)
    kept = KeptRecord.load(folder)
    record = None if kept is None else StoreRecord.from_bytes(kept.record)
    if kept is None or record is None or record.name != name or not is_of(folder, record):
        return None
    kind, state = KINDS[record.kind], json.loads(kept.state or b"{}")
    with CatalogDB(root.catalog_folder) as db:
        specs = Specs(db, partial(db.list_keys, "specs"))  # all are in use: none is forgotten
        names = {
            (each.fingerprint, each.order): specs.learn(codec.decode(spec_pb2.Spec.FromString(each.content)))
            for each in kept.specs
        }
        if record.fingerprint:
            record = replace(record, order=names[record.fingerprint, record.order])
        state = kind.rename_orders(state, names) if state else state
        # Clients may know of more than the last pass: numbers that a client has seen are not given again.
        state = kind.begin_copy(folder, record, state, db)
        before = db.get("stores", name.encode())
        with db.begin_transaction() as txn:
            for uid in {record.uid, StoreRecord.from_bytes(before).uid if before else record.uid}:
                _forget(db, uid, txn)
            txn.put("stores", name.encode(), record.to_bytes())
            if state:
                txn.put("states", record.uid.encode(), json.dumps(state).encode())
            txn.update("draws", dict(kept.draws or ()))
        # From here on the catalog continues from it: as a later moment it would take the place of what comes now.
        replace(kept, moment=read_moments(db).last).save(folder)
    return [] if kept.draws is not None else [_LOST_DRAWS.format(name)]


def _forget(db: CatalogDB, uid: str, txn: Transaction) -> None:
    """Deletes what the catalog has of an incarnation of a store apart from its record."""
    txn.delete("states", uid.encode())
    txn.delete("packed", uid.encode())
    forget_draw_records(db, uid, txn)
