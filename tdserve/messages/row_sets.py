"""Sets of rows of one store, however many: a run, a few numbers, or a bit per row.

Ten million rows are a run of three numbers, or a megabyte of bits: an operation on two such sets takes a fraction of a
millisecond, where lists of their numbers took seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import (
    PIECE_ROWS,
    RUN_FORM,
    RUN_PIECE_ROWS,
    Rows,
    decode_bits,
    decode_rows,
    encode_bits,
    encode_rows,
    is_run,
)

Bits = NDArray[np.uint8]


class RowSet:
    """An immutable set of row numbers.

    It has one of three forms: a run ``[start, stop)``; up to ``PIECE_ROWS`` numbers, sorted; a bit per row, most
    significant first in each byte. Build it with :meth:`run`, :meth:`from_rows`, :meth:`from_range` or
    :meth:`from_mask`; for very many rows that are not a run, do that in a thread.
    """

    __slots__ = ("_bits", "_listed", "_num", "_start", "_stop")

    def __init__(self, *, start: int = 0, stop: int = 0, listed: Rows | None = None, bits: Bits | None = None) -> None:
        self._start, self._stop = start, stop
        self._listed = listed
        self._bits = bits
        if listed is not None:
            self._num = len(listed)
        elif bits is not None:
            self._num = int(np.bitwise_count(bits).sum(dtype=np.int64))
        else:
            self._num = stop - start

    @classmethod
    def run(cls, start: int, stop: int) -> RowSet:
        """Returns the rows from ``start`` to before ``stop``."""
        return cls(start=start, stop=max(start, stop))

    @classmethod
    def from_rows(cls, rows: Rows) -> RowSet:
        """Returns a set of these rows, given in any order and possibly repeated."""
        if len(rows) and is_run(rows):
            return cls.run(int(rows[0]), int(rows[-1]) + 1)
        if len(rows) <= PIECE_ROWS:
            return cls(listed=np.unique(rows))
        mask = np.zeros(int(rows.max()) + 1, np.bool_)
        mask[rows] = True
        return cls.from_mask(mask)

    @classmethod
    def from_range(cls, rows: range) -> RowSet:
        """Returns the rows of a range of either direction."""
        rows = rows if rows.step > 0 else rows[::-1]
        if rows.step == 1:
            return cls.run(rows.start, rows.stop)
        if len(rows) <= PIECE_ROWS:
            return cls(listed=np.arange(rows.start, rows.stop, rows.step))
        mask = np.zeros(rows.stop, np.bool_)
        mask[rows.start :: rows.step] = True
        return cls.from_mask(mask)

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_]) -> RowSet:
        """Returns the rows whose elements are true."""
        return cls._from_bits(np.packbits(mask))

    @classmethod
    def decode(cls, content: bytes, *, max_rows: int | None = None) -> RowSet:
        """Decodes the result of :meth:`encode` or ``encode_rows``. ``max_rows``, and errors, as in ``decode_rows``; a
        run, which takes no memory, may be longer."""
        bits = decode_bits(content)
        if bits is not None:
            return cls(bits=bits)
        if len(content) == RUN_FORM.size:
            form, first, num_rows = RUN_FORM.unpack(content)
            if form == -1:
                return cls.run(first, first + num_rows)
        return cls.from_rows(decode_rows(content, max_rows=max_rows))

    def encode(self) -> bytes:
        """Encodes the set; ``decode_rows`` reads it too."""
        if self._bits is not None:
            return encode_bits(self._bits)
        if self._listed is not None:
            return encode_rows(self._listed)
        return RUN_FORM.pack(-1, self._start, self._num)

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<RowSet of {self._num} rows>"

    @property
    def rows(self) -> Rows:
        """Returns the numbers, sorted; call it for few rows, or in a thread."""
        found = [np.arange(each.start, each.stop) if isinstance(each, slice) else each for each in self.iter_pieces()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def iter_pieces(self) -> Iterator[slice | Rows]:
        """Yields all rows, in order, in pieces on which NumPy works for less than a millisecond: of a run
        ``RUN_PIECE_ROWS`` at a time, other rows ``PIECE_ROWS`` at most."""
        if self._listed is not None:
            if len(self._listed):
                yield self._listed
        elif self._bits is None:
            for start in range(self._start, self._stop, RUN_PIECE_ROWS):
                yield slice(start, min(start + RUN_PIECE_ROWS, self._stop))
        else:
            step = RUN_PIECE_ROWS // 8
            for start in range(0, len(self._bits), step):
                found = np.flatnonzero(np.unpackbits(self._bits[start : start + step])) + 8 * start
                for first in range(0, len(found), PIECE_ROWS):
                    yield found[first : first + PIECE_ROWS]

    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these rows, none negative, are in the set."""
        if self._listed is not None:
            return np.isin(rows, self._listed)
        if self._bits is None:
            return np.asarray((rows >= self._start) & (rows < self._stop))
        places = rows >> 3
        is_near = places < len(self._bits)
        found: NDArray[np.bool_] = is_near.copy()
        found[is_near] = (self._bits[places[is_near]] << (rows[is_near] & 7).astype(np.uint8)) & 0x80 != 0
        return found

    def has_overlap(self, other: RowSet) -> bool:
        """Returns whether any row is in both."""
        if not self or not other:
            return False
        for one, two in ((self, other), (other, self)):
            if one._listed is not None:
                return bool(two.contains(one._listed).any())
        if self._bits is None and other._bits is None:
            return max(self._start, other._start) < min(self._stop, other._stop)
        ours, theirs = _pad_to_longer(self._as_bits(), other._as_bits())
        return bool((ours & theirs).any())

    def __and__(self, other: RowSet) -> RowSet:
        """Returns the rows that are in both."""
        for one, two in ((self, other), (other, self)):
            if one._listed is not None:
                return RowSet(listed=one._listed[two.contains(one._listed)])
        if self._bits is None and other._bits is None:
            return RowSet.run(max(self._start, other._start), min(self._stop, other._stop))
        ours, theirs = _pad_to_longer(self._as_bits(), other._as_bits())
        return RowSet._from_bits(ours & theirs)

    def __sub__(self, other: RowSet) -> RowSet:
        """Returns the rows of this one that are not in the other."""
        if not self.has_overlap(other):
            return self
        if self._listed is not None:
            return RowSet(listed=self._listed[~other.contains(self._listed)])
        ours, theirs = _pad_to_longer(self._as_bits(), other._as_bits())
        return RowSet._from_bits(ours & ~theirs)

    def __or__(self, other: RowSet) -> RowSet:
        """Returns the rows that are in either."""
        if not self or not other:
            return self or other
        ours, theirs = _pad_to_longer(self._as_bits(), other._as_bits())
        return RowSet._from_bits(ours | theirs)

    @classmethod
    def _from_bits(cls, bits: Bits) -> RowSet:
        found = cls(bits=bits)
        if found._num > PIECE_ROWS:
            return found
        near = np.flatnonzero(bits)
        places, offsets = np.nonzero(np.unpackbits(bits[near, None], axis=1))
        return cls(listed=near[places] * 8 + offsets)

    def _as_bits(self) -> Bits:
        if self._bits is not None:
            return self._bits
        if self._listed is not None:
            bits = np.zeros((int(self._listed[-1]) >> 3) + 1 if len(self._listed) else 0, np.uint8)
            np.bitwise_or.at(bits, self._listed >> 3, (0x80 >> (self._listed & 7)).astype(np.uint8))
            return bits
        bits = np.zeros(-(-self._stop // 8), np.uint8)
        first, last = self._start >> 3, (self._stop - 1) >> 3
        bits[first:] = 0xFF
        bits[first] &= 0xFF >> (self._start & 7)
        bits[last] &= 0xFF << (7 - (self._stop - 1 & 7)) & 0xFF
        return bits


def _pad_to_longer(one: Bits, two: Bits) -> tuple[Bits, Bits]:
    """Returns both, padded to the length of the longer one."""
    size = max(len(one), len(two))
    padded = [
        bits if len(bits) == size else np.append(bits, np.zeros(size - len(bits), np.uint8)) for bits in (one, two)
    ]
    return padded[0], padded[1]
