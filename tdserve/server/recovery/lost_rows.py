"""Rows that a local client was overwriting in place when it died: they report DATA_LOSS until they are written again.

They stay odd, so that who reads the files by himself finds them unreadable, and asks here why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from operator import or_

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import CorruptDataError
from tdserve.messages.row_numbers import PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.server.recovery import writer_records
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.store.catalog_db import CatalogDB, Transaction
from tdserve.structure.tree import Path

_KIND = "overwrites"

_WRITTEN = b"last-overwrite"
"""Under it: the key of the overwrite that was committed last. Its rows become even behind that, and its record goes
with the next transaction: at most this one of few rows is found on record after a crash although it is whole."""

_WHOLE = b"whole "
"""In front of the record of one of very many rows that was committed."""

POWER_LOSS = "power-loss"
"""In place of a writer's lock: nobody died, but the rows had not reached the disk when the power was lost."""


@dataclass(frozen=True, eq=False)
class Overwrite:
    """One write in place, on record from before its first byte until it is committed, or its rows are written again.

    Attributes:
        uid: The store's incarnation.
        lock_name: Held by the writer's process.
        request: The writer's.
        rows: That it writes.
        keys: Leaves or nodes that it writes; none: all.
        is_whole: Whether its record says that it was committed.
    """

    uid: str
    lock_name: str
    request: int
    rows: RowSet
    keys: tuple[Path, ...]
    is_whole: bool = False

    @property
    def key(self) -> bytes:
        """Of the record."""
        return writer_records.key_of(_KIND, uid=self.uid, lock_name=self.lock_name, num=self.request)

    @property
    def record(self) -> bytes:
        """What is on record."""
        return (_WHOLE if self.is_whole else b"") + json.dumps(self.keys).encode() + b"\n" + self.rows.encode()

    def left(self, rows: RowSet) -> ReservedRows:
        """Rows of it that have left their table meanwhile, as they are on record then."""
        return ReservedRows(self.uid, self.lock_name, -self.request, rows.encode())

    def save(self, db: CatalogDB) -> None:
        """Writes it down."""
        db.put("pending", self.key, self.record)

    def forget(self, txn: Transaction) -> None:
        """It is over."""
        txn.delete("pending", self.key)
        txn.delete("pending", self.left(self.rows).key)

    def commit(self, txn: Transaction) -> None:
        """Its content is in place: what is odd of it is whole from this transaction on. Its record is to go later."""
        if len(self.rows) > PIECE_ROWS:  # they become even in several turns, in which others may be committed
            txn.put("pending", self.key, replace(self, is_whole=True).record)
        else:
            txn.put("pending", _WRITTEN, self.key)
        txn.delete("pending", self.left(self.rows).key)

    def is_committed(self, db: CatalogDB) -> bool:
        """Whether its content was whole before a crash."""
        return self.is_whole or db.get("pending", _WRITTEN) == self.key

    @classmethod
    def records_of(cls, db: CatalogDB, uid: str) -> list[bytes]:
        """Of all records of one store."""
        return writer_records.keys_of(db, _KIND, uid)

    @classmethod
    def load(cls, db: CatalogDB, uid: str) -> list[Overwrite]:
        """All on record of one store."""
        found = []
        for lock_name, request, content in writer_records.load(db, _KIND, uid):
            keys, _, rows = content.removeprefix(_WHOLE).partition(b"\n")
            paths = tuple(tuple(path) for path in json.loads(keys))
            is_whole = content.startswith(_WHOLE)
            found.append(cls(uid, lock_name, request, RowSet.decode(rows), paths, is_whole=is_whole))
        return found


@dataclass
class LostRows:
    """What was lost of one store.

    Attributes:
        overwrites: That were cut short.
        may_heal_until_s: Point in time (monotonic) until which a writer that a restart of the server has cut short may
            be expected to write again; infinity before sessions can be opened.
    """

    overwrites: list[Overwrite] = field(default_factory=list)
    may_heal_until_s: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.overwrites)

    @property
    def row_set(self) -> RowSet:
        """All lost rows."""
        return reduce(or_, (each.rows for each in self.overwrites), RowSet.run(0, 0))

    def check(self, rows: RowSet, *, store: str, remedy: str = "write them again") -> None:
        """Raises CorruptDataError when one of these rows is lost; ``remedy`` says what to do."""
        if not self.overwrites or not (lost := rows & self.row_set):
            return
        first = list(islice((number for piece in lost.pieces() for number in _numbers(piece)), 8))
        shown = ", ".join(map(str, first)) + (", ..." if len(lost) > len(first) else "")
        raise CorruptDataError(
            path=f"store {store!r}, rows {shown}",
            expected="rows that were written whole",
            actual=f"{self._why(lost)}; {remedy}",
        )

    def _why(self, rows: RowSet) -> str:
        if POWER_LOSS in self.touching(rows):
            return "rows that had not reached the disk when the power was lost"
        return "rows whose writer died while it overwrote them"

    def touching(self, rows: RowSet) -> list[str]:
        """Lock names of the writers that may still write into these rows."""
        return [each.lock_name for each in self.overwrites if each.rows.overlaps(rows)]

    def replace_written(self, rows: RowSet, keys: Sequence[Path]) -> dict[bytes, bytes | None]:
        """Forgets what was lost of rows that were written again; returns what to change on record."""
        kept: list[Overwrite] = []
        changes: dict[bytes, bytes | None] = {}
        for each in self.overwrites:
            is_covered = not keys or (bool(each.keys) and all(_is_below(path, keys) for path in each.keys))
            left = each.rows - rows if is_covered else each.rows
            if left:
                kept.append(each if len(left) == len(each.rows) else replace(each, rows=left))
            if len(left) != len(each.rows):
                changes[each.key] = kept[-1].record if len(left) else None
        self.overwrites = kept
        return changes


def _numbers(piece: slice | NDArray[np.int64]) -> range | list[int]:
    return range(piece.start, piece.stop) if isinstance(piece, slice) else piece[:8].tolist()


def _is_below(path: Path, keys: Sequence[Path]) -> bool:
    return any(path[: len(key)] == tuple(key) for key in keys)
