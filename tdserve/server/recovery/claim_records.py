"""Records of the rows that a writer may claim; after a restart its claim file shows what became of them.

``server/README.md`` has reading orders of claims and recovery.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.base.ids import CLIENT_ID_BYTES
from tdserve.rules.catalog import StoreRecord
from tdserve.server.recovery import writer_records
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.store.rows.claim_file import FOLDER, ClaimFile, remove_others

_KIND = "claims"
_NUMBERS = struct.Struct(f"<4q{CLIENT_ID_BYTES}s")


@dataclass(frozen=True)
class ClaimRecord:
    """The rows of one store that one writer may claim.

    Attributes:
        uid: Incarnation of the store.
        lock_name: Names the writer: a local client holds the lock of this name.
        client_id: Id of the local client whose extends fill the rows; zeros: a worker's clients.
        num: Number that distinguishes the writer's claims.
        first_row: Its first row; the others follow round the ring.
        num_allowed: Number of rows that the writer may claim.
        num_filled: Number of rows that were committed.
        num_taken: Number of records in the claim file that were committed.
    """

    uid: str
    lock_name: str
    client_id: bytes
    num: int
    first_row: int
    num_allowed: int
    num_filled: int = 0
    num_taken: int = 0

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return writer_records.make_key(_KIND, uid=self.uid, lock_name=self.lock_name, num=self.num)

    @property
    def file_name(self) -> str:
        """Name of the claim file, unique: a process that still has the file of an earlier claim does no harm."""
        return f"{self.lock_name}.{self.num}"

    def take(self, num_rows: int, *, num_taken: int, num_allowed: int | None = None) -> ClaimRecord:
        """Returns the record after further rows were settled.

        Args:
            num_rows: Their number.
            num_taken: Records in the claim file that are settled then.
            num_allowed: Rows that the writer may claim then; by default as many as before.
        """
        allowed = self.num_allowed if num_allowed is None else num_allowed
        return replace(self, num_filled=self.num_filled + num_rows, num_taken=num_taken, num_allowed=allowed)

    def save(self, target: CatalogDB | Transaction) -> None:
        """Saves the record before the writer may claim the rows, and again in each transaction that commits some of
        them."""
        numbers = (self.first_row, self.num_allowed, self.num_filled, self.num_taken)
        target.put("pending", self.key, _NUMBERS.pack(*numbers, self.client_id))

    @classmethod
    def list_keys(cls, db: CatalogDB, uid: str) -> list[bytes]:
        """Returns the keys of all records of one store."""
        return writer_records.list_keys(db, _KIND, uid)

    @classmethod
    def load(cls, db: CatalogDB, uid: str) -> list[ClaimRecord]:
        """Returns all records of one store."""
        found = []
        for lock_name, num, content in writer_records.load(db, _KIND, uid):
            first_row, num_allowed, num_filled, num_taken, client_id = _NUMBERS.unpack(content)
            found.append(cls(uid, lock_name, client_id, num, first_row, num_allowed, num_filled, num_taken))
        return found

    @classmethod
    def list_uids(cls, db: CatalogDB) -> set[str]:
        """Returns the uids of the stores that have a record."""
        return {key.split(b":")[1].decode() for key, _ in db.scan("pending", f"{_KIND}:".encode())}

    def find_unfilled(self, file: ClaimFile | None, capacity: int) -> list[NDArray[np.int64]]:
        """Returns the rows that were claimed and are not committed, as the writer's file shows: an array per claim, in
        order.

        Args:
            file: The claim file, in which nothing more can be claimed. If it is None or contradicts itself, all that
                was allowed may have been claimed.
            capacity: Capacity of the ring.
        """
        left, sizes = self.num_allowed - self.num_filled, []
        if file is not None:
            recorded = [file.record(number).num_rows for number in range(self.num_taken, file.num_written)]
            num_open = file.num_claimed - self.num_filled - sum(recorded)
            if min(recorded, default=1) > 0 and num_open >= 0 and sum(recorded) + num_open <= left:
                left, sizes = num_open, recorded
        sizes += [left] if left else []
        starts = np.cumsum([self.first_row + self.num_filled, *sizes])
        return [np.arange(begin, end) % capacity for begin, end in pairwise(starts)]


def find_unfilled_claims(
    db: CatalogDB, folder: Path, store: StoreRecord, generations: NDArray[np.int64]
) -> list[tuple[ClaimRecord, list[NDArray[np.int64]]]]:
    """Returns what was claimed of a table before a restart and is not committed.

    It also makes these rows odd, which their writers were about to do.
    """
    found = []
    for record in ClaimRecord.load(db, store.uid):
        file = None
        with suppress(TDServeError):
            file = ClaimFile.open(folder / FOLDER / record.file_name)
            file.end()
        several = record.find_unfilled(file, store.capacity)
        for rows in several:
            generations[rows] |= 1
        found.append((record, several))
    remove_others(folder / FOLDER, {record.file_name for record, _ in found})
    return found
