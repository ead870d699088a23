"""Rows that a local client was overwriting in place when it died: they report DATA_LOSS until they are written again.

They stay odd, so that who reads the files by himself finds them unreadable, and asks here why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import CorruptDataError
from tdserve.row_numbers import decode_rows, encode_rows
from tdserve.server.recovery import writer_records
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.spec.tree import Path
from tdserve.store.catalog_db import CatalogDB, Transaction

_KIND = "overwrites"


@dataclass(frozen=True, eq=False)
class Overwrite:
    """One write in place, on record from before its first byte until it is committed, or its rows are written again.

    Attributes:
        uid: The store's incarnation.
        lock_name: Held by the writer's process.
        request: The writer's.
        rows: That it writes, each once.
        keys: Leaves or nodes that it writes; none: all.
    """

    uid: str
    lock_name: str
    request: int
    rows: NDArray[np.int64]
    keys: tuple[Path, ...]

    @property
    def key(self) -> bytes:
        """Of the record."""
        return writer_records.key_of(_KIND, uid=self.uid, lock_name=self.lock_name, num=self.request)

    @property
    def record(self) -> bytes:
        """What is on record."""
        return json.dumps(self.keys).encode() + b"\n" + encode_rows(self.rows)

    def left(self, rows: NDArray[np.int64]) -> ReservedRows:
        """Rows of it that have left their table meanwhile, as they are on record then."""
        return ReservedRows(self.uid, self.lock_name, -self.request, encode_rows(rows))

    def save(self, db: CatalogDB) -> None:
        """Writes it down."""
        db.put("pending", self.key, self.record)

    def forget(self, txn: Transaction) -> None:
        """It is over."""
        txn.delete("pending", self.key)
        txn.delete("pending", self.left(self.rows).key)

    @classmethod
    def records_of(cls, db: CatalogDB, uid: str) -> list[bytes]:
        """Of all records of one store."""
        return writer_records.keys_of(db, _KIND, uid)

    @classmethod
    def load(cls, db: CatalogDB, uid: str) -> list[Overwrite]:
        """All on record of one store."""
        found = []
        for lock_name, request, content in writer_records.load(db, _KIND, uid):
            keys, _, rows = content.partition(b"\n")
            paths = tuple(tuple(path) for path in json.loads(keys))
            found.append(cls(uid, lock_name, request, decode_rows(rows), paths))
        return found


@dataclass
class LostRows:
    """What was lost of one store.

    Attributes:
        overwrites: That were cut short.
        may_heal_until_s: Point in time (monotonic) until which a writer that a restart of the server has cut short may
            be expected to write again.
    """

    overwrites: list[Overwrite] = field(default_factory=list)
    may_heal_until_s: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.overwrites)

    @property
    def rows(self) -> NDArray[np.int64]:
        """All lost rows, some perhaps more than once."""
        found = [each.rows for each in self.overwrites]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def check(self, rows: NDArray[np.int64], *, store: str, remedy: str = "write them again") -> None:
        """Raises CorruptDataError when one of these rows is lost; ``remedy`` says what to do."""
        if not self.overwrites:
            return
        lost = np.unique(rows[np.isin(rows, self.rows)])
        if len(lost):
            shown = ", ".join(map(str, lost[:8].tolist())) + (", ..." if len(lost) > 8 else "")
            raise CorruptDataError(
                path=f"store {store!r}, rows {shown}",
                expected="rows that were written whole",
                actual=f"rows whose writer died while it overwrote them; {remedy}",
            )

    def touching(self, rows: NDArray[np.int64]) -> list[str]:
        """Lock names of the writers that may still write into these rows."""
        return [each.lock_name for each in self.overwrites if np.isin(each.rows, rows).any()]

    def written(self, rows: NDArray[np.int64], keys: Sequence[Path], db: CatalogDB) -> None:
        """These rows were written again: what is whole now is not lost any more."""
        kept = []
        for each in self.overwrites:
            is_covered = not keys or (bool(each.keys) and all(_is_below(path, keys) for path in each.keys))
            left = each.rows[~np.isin(each.rows, rows)] if is_covered else each.rows
            if len(left):
                kept.append(each if len(left) == len(each.rows) else replace(each, rows=left))
            if len(left) != len(each.rows):
                db.delete("pending", each.key)
                if len(left):
                    kept[-1].save(db)
        self.overwrites = kept


def _is_below(path: Path, keys: Sequence[Path]) -> bool:
    return any(path[: len(key)] == tuple(key) for key in keys)
