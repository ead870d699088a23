"""A set of rows in the order in which they were inserted into the table, read from either end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows

_ABSENT = -1
_MIN_ROOM = 64
_MAX_MERGED_CHUNKS = 4
"""Most rows that are merged when two runs are joined, in chunks. Long chunks that overlap no others are taken as they
are; runs that overlap in more stay apart."""

_MAX_RUNS = 32
"""Runs beyond which two are joined all the same: every look at an end takes time for each."""

_SWEPT_PER_ROW = 4
"""Entries that are swept for each row that comes or goes, while there are too many dead ones: a pass over all of them
ends before a quarter more has come."""


class OrderedRows:
    """Rows in order of their sequence. Every operation is vectorised, and takes time in proportion to its own rows.

    Rows mostly come in order and go at an end, so they lie in a *run*, in chunks. A row that goes leaves a dead entry
    behind, until it is reached from an end or swept out: if there are more dead entries than others, each operation
    sweeps a few chunks. A row that comes back revives its entry if that still exists; any other row that comes out of
    order begins another run. Short runs are joined with the previous one, so there are few, except if very long ones
    overlap.

    Args:
        sequence: One int64 per row: greater is newer, all different, from 0. Read when a row is added.
        chunk_rows: Most rows of a chunk; work on one takes a fraction of a millisecond. Chunks of a short table are
            shorter.
    """

    def __init__(self, sequence: NDArray[np.int64], *, chunk_rows: int = 16_384) -> None:
        self._sequence = sequence
        # Sequences of members; an entry with another sequence than its row has here is dead.
        self._member = np.full(len(sequence), _ABSENT, np.int64)
        # Sequence of the newest entry of each row in any run, dead or not.
        self._entry = np.full(len(sequence), _ABSENT, np.int64)
        self._chunk_rows = min(chunk_rows, max(2 * len(sequence), _MIN_ROOM))
        self._runs = [_RowRun(self._chunk_rows)]
        self._num = 0
        self._num_entries = 0  # including dead ones
        self._swept_run = self._next_swept = 0  # the next chunk to sweep, and its run

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<OrderedRows {self._num} in {self._num_entries} entries of {len(self._runs)} runs>"

    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member yet.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        if (self._member[rows] != _ABSENT).any():
            raise LocalProtocolError(reason="a row that may be drawn was made so again")
        sequences = self._sequence[rows]
        self._member[rows] = sequences
        self._num += len(rows)
        is_new = self._entry[rows] != sequences
        if not is_new.all():
            rows, sequences = rows[is_new], sequences[is_new]
        if len(rows):
            self._entry[rows] = sequences
            if (sequences[1:] < sequences[:-1]).any():
                order = np.argsort(sequences)
                rows, sequences = rows[order], sequences[order]
            self._append(rows, sequences)
        self._sweep(len(rows))

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members, each named once."""
        members = rows[self._member[rows] != _ABSENT]
        self._member[members] = _ABSENT
        self._num -= len(members)
        self._sweep(len(members))

    def find_oldest(self, num_rows: int, *, beyond: int | None = None) -> Rows:
        """Returns the oldest rows, oldest first; fewer if there are fewer.

        Args:
            num_rows: How many.
            beyond: Only newer ones than this sequence.
        """
        return self._find_ends(num_rows, beyond, is_back=False)

    def find_newest(self, num_rows: int, *, beyond: int | None = None) -> Rows:
        """Returns the newest rows, newest first; as for :meth:`find_oldest`, ``beyond`` is for older ones."""
        return self._find_ends(num_rows, beyond, is_back=True)

    def _find_ends(self, num_rows: int, beyond: int | None, *, is_back: bool) -> Rows:
        if beyond is None:
            found = [self._trim(run, num_rows, is_back=is_back) for run in self._runs]
            self._runs = [self._runs[0], *(run for run in self._runs[1:] if len(run))]
        else:
            found = [self._find_beyond(run, num_rows, beyond, is_back=is_back) for run in self._runs]
        found = [each for each in found if len(each)]
        if len(found) == 1:
            return found[0][::-1] if is_back else found[0]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        order = np.argsort(self._member[rows])
        return rows[order[: -num_rows - 1 : -1] if is_back else order[:num_rows]]

    def _trim(self, run: _RowRun, num_rows: int, *, is_back: bool) -> Rows:
        """Returns up to ``num_rows`` members from one end of a run, in its order; removes the dead entries among
        them."""
        found: list[Rows] = []
        num_missing = num_rows
        for chunk in run.chunks[::-1] if is_back else run.chunks:
            if num_missing <= 0:
                break
            found.append(self._trim_chunk(chunk, num_missing, is_back=is_back))
            num_missing -= len(found[-1])
        run.drop_empty()
        if len(found) == 1:
            return found[0]
        return np.concatenate(found[::-1] if is_back else found) if found else np.empty(0, np.int64)

    def _find_beyond(self, run: _RowRun, num_rows: int, beyond: int, *, is_back: bool) -> Rows:
        """As :meth:`_trim`, of the rows beyond a sequence; removes nothing."""
        found: list[Rows] = []
        num_missing = num_rows
        for chunk in run.chunks[::-1] if is_back else run.chunks:
            if num_missing <= 0:
                break
            sequences = chunk.sequences[chunk.start : chunk.end]
            if not len(sequences) or (sequences[0] >= beyond if is_back else sequences[-1] <= beyond):
                continue
            place = chunk.start + int(np.searchsorted(sequences, beyond, side="left" if is_back else "right"))
            part = slice(chunk.start, place) if is_back else slice(place, chunk.end)
            rows = chunk.rows[part]
            rows = rows[self._member[rows] == chunk.sequences[part]]
            found.append(rows[-num_missing:] if is_back else rows[:num_missing])
            num_missing -= len(found[-1])
        return np.concatenate(found[::-1] if is_back else found) if found else np.empty(0, np.int64)

    def _trim_chunk(self, chunk: _Chunk, num_rows: int, *, is_back: bool) -> Rows:
        span = num_rows
        while True:
            span = min(span, len(chunk))
            part = slice(chunk.end - span, chunk.end) if is_back else slice(chunk.start, chunk.start + span)
            rows, sequences = chunk.rows[part], chunk.sequences[part]
            is_alive = self._member[rows] == sequences
            num_alive = int(np.count_nonzero(is_alive))
            if num_alive >= num_rows or span == len(chunk):
                break
            span *= 2
        if num_alive == span:
            whole: Rows = rows.copy()
            return whole
        self._drop_entries(rows[~is_alive], sequences[~is_alive])
        alive: Rows = rows[is_alive]
        alive_sequences: Rows = sequences[is_alive]
        if is_back:
            chunk.end -= span - num_alive
            part = slice(chunk.end - num_alive, chunk.end)
        else:
            chunk.start += span - num_alive
            part = slice(chunk.start, chunk.start + num_alive)
        chunk.rows[part], chunk.sequences[part] = alive, alive_sequences
        return alive[max(0, num_alive - num_rows) :] if is_back else alive[:num_rows]

    def _append(self, rows: Rows, sequences: Rows) -> None:
        self._num_entries += len(rows)
        for run in (self._runs[0], self._runs[-1]):
            if not run.chunks or sequences[0] > run.last_sequence:
                run.append(rows, sequences)
                break
        else:
            self._runs.append(_RowRun(self._chunk_rows))
            self._runs[-1].append(rows, sequences)
        # Each is more than twice as long as the next one, so there are few. The first is not joined with others: it may
        # be very long, and rows that come in order go there.
        while len(self._runs) > 2 and len(self._runs[-2]) <= 2 * len(self._runs[-1]) and self._join_last():
            pass

    def _join_last(self) -> bool:
        """Joins the last two runs; returns False if they overlap in too many chunks."""
        chunks = [chunk for run in self._runs[-2:] for chunk in run.chunks if len(chunk)]
        groups = _group_to_merge(chunks, self._chunk_rows // 2)
        num_merged = sum(sum(map(len, group)) for group in groups if len(group) > 1)
        if num_merged > _MAX_MERGED_CHUNKS * self._chunk_rows and len(self._runs) <= _MAX_RUNS:
            return False
        joined = _RowRun(self._chunk_rows)
        for group in groups:
            if len(group) == 1:
                joined.chunks.append(group[0])
            else:
                joined.append(*self._merge(group))
        self._runs[-2:] = [joined]
        return True

    def _merge(self, chunks: Sequence[_Chunk]) -> tuple[Rows, Rows]:
        """Returns the living rows of chunks and their sequences, in order."""
        rows = np.concatenate([chunk.rows[chunk.start : chunk.end] for chunk in chunks])
        sequences = np.concatenate([chunk.sequences[chunk.start : chunk.end] for chunk in chunks])
        is_alive = self._member[rows] == sequences
        self._drop_entries(rows[~is_alive], sequences[~is_alive])
        rows, sequences = rows[is_alive], sequences[is_alive]
        order = np.argsort(sequences, kind="stable")
        return rows[order], sequences[order]

    def _sweep(self, num_rows: int) -> None:
        """Removes dead entries from a few chunks, if there are more of them than others; ``num_rows`` came or went."""
        if self._num_entries <= 2 * self._num + _MIN_ROOM:
            return
        for _ in range(1 + _SWEPT_PER_ROW * num_rows // self._chunk_rows):
            run = self._find_swept()
            if run is None:
                return
            chunk = run.chunks[self._next_swept]
            self._trim_chunk(chunk, len(chunk), is_back=False)
            before = run.chunks[self._next_swept - 1] if self._next_swept else None
            if before is not None and len(before) + len(chunk) <= self._chunk_rows // 2:
                before.take_in(chunk)
            if len(chunk):
                self._next_swept += 1
            else:
                del run.chunks[self._next_swept]
        self._runs = [self._runs[0], *(run for run in self._runs[1:] if run.chunks)]

    def _find_swept(self) -> _RowRun | None:
        """Returns the run that has the next chunk to sweep, in turn; None if there is no chunk."""
        for _ in range(len(self._runs) + 1):
            self._swept_run %= len(self._runs)
            if self._next_swept < len(self._runs[self._swept_run].chunks):
                return self._runs[self._swept_run]
            self._swept_run, self._next_swept = self._swept_run + 1, 0
        return None

    def _drop_entries(self, rows: Rows, sequences: Rows) -> None:
        self._num_entries -= len(rows)
        self._entry[rows[self._entry[rows] == sequences]] = _ABSENT


def _group_to_merge(chunks: Sequence[_Chunk], num_small: int) -> list[list[_Chunk]]:
    """Returns chunks in order of their sequences. Those that overlap, also by way of others, are in one group, and so
    are neighbours that have no more than ``num_small`` rows together."""
    groups: list[list[_Chunk]] = []
    last, num_rows = -1, 0
    for chunk in sorted(chunks, key=lambda chunk: int(chunk.sequences[chunk.start])):
        num_rows += len(chunk)
        if groups and (chunk.sequences[chunk.start] <= last or num_rows <= num_small):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            num_rows = len(chunk)
        last = max(last, int(chunk.sequences[chunk.end - 1]))
    return groups


@dataclass
class _Chunk:
    """Rows with their sequences, oldest first.

    Attributes:
        start, end: The filled part of the arrays.
    """

    rows: Rows
    sequences: Rows
    start: int = 0
    end: int = 0

    @classmethod
    def make(cls, num_rows: int) -> _Chunk:
        """Returns an empty chunk with room for ``num_rows``."""
        return cls(np.empty(num_rows, np.int64), np.empty(num_rows, np.int64))

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, rows: Rows, sequences: Rows) -> int:
        """Appends as many newer rows as there is room for; returns how many."""
        num_rows = min(len(rows), len(self.rows) - self.end)
        part = slice(self.end, self.end + num_rows)
        self.rows[part], self.sequences[part] = rows[:num_rows], sequences[:num_rows]
        self.end += num_rows
        return num_rows

    def take_in(self, other: _Chunk) -> None:
        """Appends all rows of a newer chunk, which is empty then; both together fit."""
        num_rows = len(self)
        self.rows[:num_rows] = self.rows[self.start : self.end].copy()
        self.sequences[:num_rows] = self.sequences[self.start : self.end].copy()
        self.start, self.end = 0, num_rows
        part = slice(other.start, other.end)
        self.append(other.rows[part], other.sequences[part])
        other.start = other.end


class _RowRun:
    """Rows with their sequences, oldest first, in chunks of ``chunk_rows`` none of which is empty."""

    def __init__(self, chunk_rows: int) -> None:
        self._chunk_rows = chunk_rows
        self.chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest row; there must be one."""
        chunk = self.chunks[-1]
        return int(chunk.sequences[chunk.end - 1])

    def append(self, rows: Rows, sequences: Rows) -> None:
        """Appends newer rows."""
        begin = self.chunks[-1].append(rows, sequences) if self.chunks else 0
        while begin < len(rows):
            self.chunks.append(_Chunk.make(self._chunk_rows))
            begin += self.chunks[-1].append(rows[begin:], sequences[begin:])

    def drop_empty(self) -> None:
        """Drops empty chunks at both ends; those in between are dropped when they reach an end."""
        while self.chunks and not len(self.chunks[0]):
            del self.chunks[0]
        while self.chunks and not len(self.chunks[-1]):
            del self.chunks[-1]
