"""The records of draws that tables keep for data-parallel readers: a restarted server answers a step as before.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

from tdserve.rules.replay.draws.kept_draw import KeptDraw, Rename
from tdserve.rules.replay.table import Table
from tdserve.store.database.catalog_db import CatalogDB, PinnedCatalog, Transaction

_STEP_BYTES = 8


def save_draw(uid: str, draw: KeptDraw, txn: Transaction) -> None:
    """Records a draw of a table, or that it was dealt."""
    txn.put("draws", _make_key(uid, draw.terms.run, draw.step), draw.to_bytes())


def renew_draws(uid: str, table: Table, txn: Transaction) -> None:
    """Deletes the records of draws that a table has forgotten, and writes those that it has changed."""
    for draw in table.draws.list_changed():
        save_draw(uid, draw, txn)
    txn.show(table.draws.changed.clear)
    for run, step in table.draws.erasable:
        txn.delete("draws", _make_key(uid, run, step))
    txn.show(table.draws.erasable.clear)


def restore_draws(db: CatalogDB, uid: str, table: Table) -> None:
    """Lets a table that was just opened keep the draws on record."""
    table.draws.restore([KeptDraw.from_bytes(record) for _, record in db.scan("draws", uid.encode())], table.state)


def rename_draws(db: CatalogDB, uid: str, rename: Rename) -> None:
    """Lets the draws on record follow new generations of a table's rows; see :meth:`KeptDraw.rename`."""
    with db.begin_transaction() as txn:
        for key, record in db.scan("draws", uid.encode()):
            draw = KeptDraw.from_bytes(record)
            draw.rename(rename)
            txn.put("draws", key, draw.to_bytes())


def find_draw_records(pinned: PinnedCatalog, uid: str) -> dict[bytes, bytes]:
    """Returns the records of a table as of one moment, by key, as far as they are whole."""
    return pinned.scan("draws", uid.encode())


def list_draw_records(db: CatalogDB, uid: str) -> list[tuple[bytes, bytes]]:
    """Returns the records of a table, each with its key. Raises CorruptDataError."""
    return db.scan("draws", uid.encode())


def forget_draw_records(db: CatalogDB, uid: str, txn: Transaction) -> None:
    """Deletes all records of a table that is being deleted."""
    for key, _ in db.scan("draws", uid.encode()):
        txn.delete("draws", key)


def _make_key(uid: str, run: str, step: int) -> bytes:
    return uid.encode() + step.to_bytes(_STEP_BYTES, "big") + run.encode()
