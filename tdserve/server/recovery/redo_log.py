"""Completes a commit that a crash has cut in two: it is on record, but its generations are not all written.

The catalog's transaction and the mapped generations cannot change together. So the transaction comes first, and
contains, besides the new counters and the answer, which rows must become even. Both are written within one turn of the
event loop, so that at most one commit, the last, is ever half done. A long commit, of very many rows, takes several
turns, and keeps a record of its own until it is done.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tdserve.messages.row_numbers import decode_repeats, decode_rows, encode_repeats, encode_rows
from tdserve.store.database.catalog_db import CatalogDB, Transaction

_KEY = b"last-commit"
_LONG_KEY = b"long-commit-"
_GENERATION_NBYTES = 8


@dataclass(frozen=True, eq=False)
class RedoEntry:
    """Rows of one store and the generations that a commit gives them.

    Attributes:
        uid: Incarnation of the store.
        rows: Row numbers, int64; -1 is the store's own number.
        generations: New generations, int64, even.
        encoded: The rows as bytes, if they are already encoded.
        is_long: Whether the generations are written in several turns, between which other stores may commit.
    """

    uid: str
    rows: np.ndarray
    generations: np.ndarray
    encoded: bytes = b""
    is_long: bool = False

    @cached_property
    def record(self) -> bytes:
        """Content of the record."""
        rows = self.encoded or encode_rows(self.rows)
        head = f'{{"uid": "{self.uid}", "rows_nbytes": {len(rows)}}}'.encode()  # json takes longer than LMDB does
        # The rows of one write have mostly been reused equally often.
        num_rows = len(self.generations)
        is_equal = num_rows > 1 and np.count_nonzero(self.generations == self.generations[0]) == num_rows
        encode = _encode_near if self.is_long else encode_repeats
        return head + b"\n" + rows + (self.generations[:1].tobytes() if is_equal else encode(self.generations))

    def save(self, txn: Transaction) -> None:
        """Saves the record with the commit, in place of the last one's; that of a long commit is kept until it is
        done."""
        txn.put("pending", self._key, self.record)

    def forget(self, db: CatalogDB) -> None:
        """Deletes the record of a long commit that is done."""
        db.delete("pending", self._key)

    @property
    def _key(self) -> bytes:
        return _LONG_KEY + self.uid.encode() if self.is_long else _KEY

    @classmethod
    def load(cls, db: CatalogDB) -> list[RedoEntry]:
        """Returns the record of the last commit, and those of long commits that were not done."""
        last = db.get("pending", _KEY)
        found = [] if last is None else [cls._from_record(last)]
        return found + [cls._from_record(content, is_long=True) for _, content in db.scan("pending", _LONG_KEY)]

    @classmethod
    def _from_record(cls, content: bytes, *, is_long: bool = False) -> RedoEntry:
        head, _, numbers = content.partition(b"\n")
        fields = json.loads(head)
        rows = decode_rows(numbers[: fields["rows_nbytes"]])
        generations = _decode(numbers[fields["rows_nbytes"] :], len(rows))
        return cls(fields["uid"], rows, np.broadcast_to(generations, rows.shape), is_long=is_long)

    def repair(self, values: np.ndarray) -> int:
        """Makes rows even that a crash has left odd, in a store's generations; returns how many."""
        now = values[self.rows]
        behind = (now == self.generations - 1) | (now == 1)  # 1: never committed before
        values[self.rows[behind]] = self.generations[behind]
        return int(np.count_nonzero(behind))


def _encode_near(generations: np.ndarray) -> bytes:
    """Encodes generations that are near one another, such as those of rows that were reused unequally often: the
    smallest one, and a byte for each. Where that is longer, or a byte is too small, encodes them as
    ``encode_repeats``."""
    content = encode_repeats(generations)
    low = int(generations.min())
    if len(content) <= _GENERATION_NBYTES + len(generations) or int(generations.max()) - low > np.iinfo(np.uint8).max:
        return content
    return low.to_bytes(_GENERATION_NBYTES, "little") + (generations - low).astype(np.uint8).tobytes()


def _decode(content: bytes, num_rows: int) -> np.ndarray:
    """Decodes what ``_encode_near`` or ``encode_repeats`` returned, or, if all generations are equal, that one."""
    if len(content) == _GENERATION_NBYTES:
        return np.frombuffer(content, "<i8")
    low = int.from_bytes(content[:_GENERATION_NBYTES], "little", signed=True)
    if len(content) == _GENERATION_NBYTES + num_rows and low >= 0:
        return low + np.frombuffer(content, np.uint8, offset=_GENERATION_NBYTES).astype(np.int64)
    return decode_repeats(content, num_rows)
