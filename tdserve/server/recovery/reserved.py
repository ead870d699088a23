"""Records of the rows that a local writer may fill; after a restart they wait for the proof that it is gone.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import decode_rows
from tdserve.server.recovery import writer_records
from tdserve.store.database.catalog_db import CatalogDB

_KIND = "reserved"


@dataclass(frozen=True, eq=False)
class ReservedRows:
    """Rows that one local writer may be filling.

    Attributes:
        uid: Incarnation of the store.
        lock_name: Name of the lock that the writer's process holds.
        num: Number of the reservation. For rows that have left a table while they were overwritten: the negative number
            of that request.
        encoded: The rows, encoded as by ``row_numbers``.
    """

    uid: str
    lock_name: str
    num: int
    encoded: bytes

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row numbers."""
        return decode_rows(self.encoded)

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return writer_records.make_key(_KIND, uid=self.uid, lock_name=self.lock_name, num=self.num)

    def save(self, db: CatalogDB) -> None:
        """Saves the record, before the writer is told of the rows."""
        db.put("pending", self.key, self.encoded)

    @classmethod
    def list_keys(cls, db: CatalogDB, uid: str) -> list[bytes]:
        """Returns the keys of all records of one store."""
        return writer_records.list_keys(db, _KIND, uid)

    @classmethod
    def load(cls, db: CatalogDB, uid: str) -> list[ReservedRows]:
        """Returns all records of one store."""
        return [cls(uid, lock_name, num, rows) for lock_name, num, rows in writer_records.load(db, _KIND, uid)]
