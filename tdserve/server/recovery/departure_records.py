"""Completes a departure that a crash has cut short: it is on record, with the answer, but rows have not left.

The catalog's transaction and the mapped files cannot change together, so the transaction comes first. Its record, one
for each table, stays until the rows have left, and is deleted with a later transaction: carried out once more, it
changes nothing.

``server/README.md`` has reading orders of leases and recovery.
"""

from __future__ import annotations

import json

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.table import Table
from tdserve.store.database.catalog_db import CatalogDB, Transaction

DEPARTURE = b"departure:"
"""Prefix of the key, in front of a store's uid."""


def save_departure(uid: str, departure: Departure, txn: Transaction) -> None:
    """Records a departure, in the transaction that has its answer."""
    head = json.dumps({"newest": departure.newest, "consumer": departure.consumer}).encode()
    txn.put("pending", make_departure_key(uid), head + b"\n" + departure.rows.encode())


def forget_departure(db: CatalogDB, uid: str) -> None:
    """Has the record of a departure deleted later: all its rows have left."""
    db.delete_later("pending", make_departure_key(uid))


def complete_departure(db: CatalogDB, uid: str, table: Table) -> None:
    """Lets rows leave a table that was just opened, if a crash came between the record and that."""
    content = db.get("pending", make_departure_key(uid))
    if content is None:
        return
    head, _, encoded = content.partition(b"\n")
    rows = RowSet.decode(encoded)
    for _ in table.departures.depart_in_pieces(Departure(rows, num_rows=len(rows), **json.loads(head))):
        pass
    forget_departure(db, uid)


def make_departure_key(uid: str) -> bytes:
    """Returns the key of the record of a table."""
    return DEPARTURE + uid.encode()
