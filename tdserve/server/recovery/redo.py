"""The one step that a crash can cut in two: a commit is on record, its generations are not yet written. Repaired here.

The catalog's transaction and the mapped generations cannot change together. So the transaction comes first and carries,
beside the new counters and the answer, which rows must become even; both are written within one turn of the event loop,
so that at most one commit, the last, is ever half done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from tdserve.row_numbers import decode_rows, encode_rows
from tdserve.store.catalog_db import CatalogDB, Transaction

_KEY = b"last-commit"


@dataclass(frozen=True, eq=False)
class Redo:
    """Rows of one store and the generations that a commit gives them.

    Attributes:
        uid: The store's incarnation.
        rows: int64; -1 is the store's own number.
        generations: int64, even.
        encoded: The rows as bytes, where they are known already.
    """

    uid: str
    rows: np.ndarray
    generations: np.ndarray
    encoded: bytes = b""

    @classmethod
    def of(cls, uid: str, values: np.ndarray, rows: np.ndarray, *, encoded: bytes = b"") -> Redo:
        """For a commit of reserved (odd) rows of a store, whose generations are ``values``."""
        return cls(uid, rows, values[rows] + 1, encoded)

    def save(self, txn: Transaction) -> None:
        """Writes it beside the commit, over the one before."""
        rows = self.encoded or encode_rows(self.rows)
        head = f'{{"uid": "{self.uid}", "rows_nbytes": {len(rows)}}}'.encode()  # json takes longer than LMDB does
        # Rows of one write mostly have gone round equally often.
        num_rows = len(self.generations)
        is_equal = num_rows > 1 and np.count_nonzero(self.generations == self.generations[0]) == num_rows
        generations = self.generations[:1] if is_equal else self.generations
        txn.put("pending", _KEY, head + b"\n" + rows + generations.tobytes())

    @classmethod
    def load(cls, db: CatalogDB) -> Redo | None:
        """The last commit's; None in a fresh catalog."""
        content = db.get("pending", _KEY)
        if content is None:
            return None
        head, _, numbers = content.partition(b"\n")
        fields = json.loads(head)
        rows = decode_rows(numbers[: fields["rows_nbytes"]])
        generations = np.frombuffer(numbers[fields["rows_nbytes"] :], "<i8")
        return cls(fields["uid"], rows, np.broadcast_to(generations, rows.shape))

    def repair(self, values: np.ndarray) -> int:
        """Makes rows even that a crash has left odd, in a store's generations; returns how many."""
        behind = values[self.rows] == self.generations - 1
        values[self.rows[behind]] = self.generations[behind]
        return int(np.count_nonzero(behind))
