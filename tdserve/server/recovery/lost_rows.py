"""Rows that a local client was overwriting in place when it died: they report DATA_LOSS until they are written again.

They stay odd, so that a client that reads the files itself finds them unreadable and asks the server for the reason.

``server/README.md`` has a reading order of recovery.
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
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.structure.trees.tree import Path

_KIND = "overwrites"

_WRITTEN = b"last-overwrite"
"""Key of a record that names the last committed overwrite. The rows of that overwrite become even after the commit, and
its own record is deleted with the next transaction. So after a crash at most this one overwrite, of few rows, is on
record although it is complete."""

_WHOLE = b"whole "
"""Prefix of the record of a committed overwrite of very many rows."""

POWER_LOSS = "power-loss"
"""Takes the place of a writer's lock: no writer died, but the rows had not reached the disk when the power was lost, or
a check has found them damaged."""

SHOWN_ROWS = 8
"""Rows that an error or a description names by their numbers."""

LOST_WRITER = "lost-writer"
"""Takes the place of a writer's lock in a store that has moved or was copied: the writer has not followed."""


@dataclass(frozen=True, eq=False)
class Overwrite:
    """One write in place, on record from before its first byte until it is committed or its rows are written again.

    Attributes:
        uid: Incarnation of the store.
        lock_name: Name of the lock that the writer's process holds.
        request: Number of the writer's request.
        rows: Rows that it writes.
        keys: Leaves or nodes that it writes; none: all.
        is_whole: Whether its record states that it was committed.
    """

    uid: str
    lock_name: str
    request: int
    rows: RowSet
    keys: tuple[Path, ...]
    is_whole: bool = False

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return writer_records.make_key(_KIND, uid=self.uid, lock_name=self.lock_name, num=self.request)

    @property
    def record(self) -> bytes:
        """Content of the record."""
        return (_WHOLE if self.is_whole else b"") + json.dumps(self.keys).encode() + b"\n" + self.rows.encode()

    @property
    def moved(self) -> bytes:
        """What is known of it where the store is next, or where a copy of the store is."""
        cause = POWER_LOSS if self.lock_name == POWER_LOSS else LOST_WRITER
        return cause.encode() + b"\n" + self.record

    @classmethod
    def from_moved(cls, content: bytes, uid: str, number: int, num_rows: int) -> Overwrite:
        """Returns the overwrite of which ``moved`` is known.

        Args:
            content: The result of ``moved``.
            uid: Incarnation of the store here.
            number: Distinguishes the overwrites of the store that have come with it.
            num_rows: Rows of the store.

        Raises:
            CorruptDataError, ValueError: It is something else.
        """
        cause, _, record = content.partition(b"\n")
        if cause not in (POWER_LOSS.encode(), LOST_WRITER.encode()):
            raise CorruptDataError(path="record", expected="the cause of lost rows", actual=repr(cause)[:80])
        moved = cls.from_record(record, uid, cause.decode(), number)
        if outside := moved.rows - RowSet.run(0, num_rows):
            raise CorruptDataError(path="record", expected=f"rows below {num_rows}", actual=f"{len(outside)} others")
        return moved

    @classmethod
    def from_record(cls, content: bytes, uid: str, lock_name: str, request: int) -> Overwrite:
        """Returns the overwrite that has this ``record``."""
        keys, _, rows = content.removeprefix(_WHOLE).partition(b"\n")
        paths = tuple(tuple(path) for path in json.loads(keys))
        return cls(uid, lock_name, request, RowSet.decode(rows), paths, is_whole=content.startswith(_WHOLE))

    def select_left(self, rows: RowSet) -> ReservedRows:
        """Returns the record of those of its rows that have left their table meanwhile."""
        return ReservedRows(self.uid, self.lock_name, -self.request, rows.encode())

    def save(self, db: CatalogDB | Transaction) -> None:
        """Saves the record."""
        db.put("pending", self.key, self.record)

    def forget(self, txn: Transaction) -> None:
        """Deletes all its records."""
        txn.delete("pending", self.key)
        txn.delete("pending", self.select_left(self.rows).key)

    def commit(self, txn: Transaction) -> None:
        """Records that its content is in place: rows that are still odd are complete from this transaction on.

        Its own record is deleted later.
        """
        if len(self.rows) > PIECE_ROWS:  # they become even in several turns, in which others may be committed
            txn.put("pending", self.key, replace(self, is_whole=True).record)
        else:
            txn.put("pending", _WRITTEN, self.key)
        txn.delete("pending", self.select_left(self.rows).key)

    def is_committed(self, db: CatalogDB) -> bool:
        """Returns whether its content was complete before a crash."""
        return self.is_whole or db.get("pending", _WRITTEN) == self.key

    @classmethod
    def list_keys(cls, db: CatalogDB, uid: str) -> list[bytes]:
        """Returns the keys of all records of one store."""
        return writer_records.list_keys(db, _KIND, uid)

    @classmethod
    def load(cls, db: CatalogDB, uid: str) -> list[Overwrite]:
        """Returns all records of one store."""
        found = writer_records.load(db, _KIND, uid)
        return [cls.from_record(content, uid, lock_name, request) for lock_name, request, content in found]


@dataclass
class LostRows:
    """The lost rows of one store.

    Attributes:
        overwrites: Overwrites that were cut short.
        rewrite_grace_until_s: Point in time (monotonic) until which a writer that a restart of the server has cut short
            may be expected to write again; infinity before sessions can be opened.
    """

    overwrites: list[Overwrite] = field(default_factory=list)
    rewrite_grace_until_s: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.overwrites)

    @property
    def row_set(self) -> RowSet:
        """All lost rows."""
        return reduce(or_, (each.rows for each in self.overwrites), RowSet.run(0, 0))

    def check(self, rows: RowSet, *, store: str, remedy: str = "write them again") -> None:
        """Raises CorruptDataError if one of these rows is lost; ``remedy`` is what the caller can do."""
        if not self.overwrites or not (lost := rows & self.row_set):
            return
        first = list_first(lost)
        shown = ", ".join(map(str, first)) + (", ..." if len(lost) > len(first) else "")
        raise CorruptDataError(
            path=f"store {store!r}, rows {shown}",
            expected="rows that were written whole",
            actual=f"{self._explain(lost)}; {remedy}",
        )

    def _explain(self, rows: RowSet) -> str:
        if POWER_LOSS in self.find_writers(rows):
            return "rows that a check has found damaged, or that had not reached the disk when the power was lost"
        return "rows whose writer died while it overwrote them"

    def find_writers(self, rows: RowSet) -> list[str]:
        """Returns the lock names of the writers that have left some of these rows unfinished, gone or not; or what
        takes their place."""
        return [each.lock_name for each in self.overwrites if each.rows.has_overlap(rows)]

    def is_grace_over(self, rows: RowSet, until_s: float) -> bool:
        """Returns whether there is no reason to wait until ``until_s`` any more: no writer can repeat its write of
        these rows, or ``rewrite_grace_until_s`` has changed."""
        return self.rewrite_grace_until_s != until_s or not self.may_be_repeated(rows)

    def may_be_repeated(self, rows: RowSet) -> bool:
        """Returns whether a writer may repeat a write of some of these rows."""
        return not {POWER_LOSS, LOST_WRITER}.issuperset(self.find_writers(rows))

    def replace_written(self, rows: RowSet, keys: Sequence[Path]) -> dict[bytes, bytes | None]:
        """Removes rows that were written again; returns the changes to make on record, by key; None deletes."""
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


def list_first(rows: RowSet) -> list[int]:
    """Returns the numbers of the first rows of a set, ``SHOWN_ROWS`` at most."""
    return list(islice((number for piece in rows.iter_pieces() for number in _list_numbers(piece)), SHOWN_ROWS))


def _list_numbers(piece: slice | NDArray[np.int64]) -> range | list[int]:
    return range(piece.start, piece.stop) if isinstance(piece, slice) else piece[:SHOWN_ROWS].tolist()


def _is_below(path: Path, keys: Sequence[Path]) -> bool:
    return any(path[: len(key)] == tuple(key) for key in keys)
