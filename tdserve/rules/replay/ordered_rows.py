"""A set of rows in the order in which they were inserted into the table, read from either end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.rules.replay.live_rows import Rows

_ABSENT = -1
_MIN_ROOM = 64


class OrderedRows:
    """Rows in order of their sequence. Every operation is vectorised, and costs O(rows) in the long run.

    Rows come mostly in order and go mostly at an end, so they lie one after the other in a *run*. A row that goes
    leaves its entry behind, which is dead until it is met from an end, or until there are more dead ones than others. A
    row that comes back revives its entry if that is still there; one that comes out of order otherwise begins another
    run. Short runs are joined with the one before, so that there are never more than about twenty.

    Args:
        sequence: One int64 per row: greater is newer, all different, from 0. Read when a row is added.
    """

    def __init__(self, sequence: NDArray[np.int64]) -> None:
        self._sequence = sequence
        # Of members; an entry with another sequence than its row has here is dead.
        self._member = np.full(len(sequence), _ABSENT, np.int64)
        # Of the newest entry that a row has in any run, dead or not.
        self._entry = np.full(len(sequence), _ABSENT, np.int64)
        self._runs = [_Run()]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<OrderedRows {self._num} in {len(self._runs)} runs>"

    def add(self, rows: Rows) -> None:
        """Takes rows in, each once and none a member yet.

        Raises:
            LocalProtocolError: A row is a member already. Nothing was changed.
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
        self._bound()

    def remove(self, rows: Rows) -> None:
        """Drops those rows that are members, each named once."""
        members = rows[self._member[rows] != _ABSENT]
        self._member[members] = _ABSENT
        self._num -= len(members)
        self._bound()

    def oldest(self, num_rows: int) -> Rows:
        """The oldest rows, oldest first. There must be so many."""
        return self._ends(num_rows, is_back=False)

    def newest(self, num_rows: int) -> Rows:
        """The newest rows, newest first. There must be so many."""
        return self._ends(num_rows, is_back=True)

    def _ends(self, num_rows: int, *, is_back: bool) -> Rows:
        found = [self._trim(run, num_rows, is_back=is_back) for run in self._runs]
        found = [each for each in found if len(each)]
        self._runs = [self._runs[0], *(run for run in self._runs[1:] if len(run))]
        if len(found) == 1:
            return found[0][::-1] if is_back else found[0]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        order = np.argsort(self._member[rows])
        return rows[order[: -num_rows - 1 : -1] if is_back else order[:num_rows]]

    def _trim(self, run: _Run, num_rows: int, *, is_back: bool) -> Rows:
        """Up to ``num_rows`` members from one end of a run, in its order; takes the dead entries among them out."""
        span = num_rows
        while True:
            span = min(span, len(run))
            part = slice(run.end - span, run.end) if is_back else slice(run.start, run.start + span)
            rows, sequences = run.rows[part], run.sequences[part]
            is_alive = self._member[rows] == sequences
            num_alive = int(np.count_nonzero(is_alive))
            if num_alive >= num_rows or span == len(run):
                break
            span *= 2
        if num_alive == span:
            whole: Rows = rows.copy()
            return whole
        self._forget(rows[~is_alive], sequences[~is_alive])
        alive: Rows = rows[is_alive]
        alive_sequences: Rows = sequences[is_alive]
        if is_back:
            run.end -= span - num_alive
            part = slice(run.end - num_alive, run.end)
        else:
            run.start += span - num_alive
            part = slice(run.start, run.start + num_alive)
        run.rows[part], run.sequences[part] = alive, alive_sequences
        return alive[max(0, num_alive - num_rows) :] if is_back else alive[:num_rows]

    def _append(self, rows: Rows, sequences: Rows) -> None:
        for run in (self._runs[0], self._runs[-1]):
            if not len(run) or sequences[0] > run.sequences[run.end - 1]:
                run.append(rows, sequences)
                break
        else:
            self._runs.append(_Run())
            self._runs[-1].append(rows, sequences)
        # Each is more than twice as long as the next one, so there are few. The first is not joined with others: it
        # may be very long, and rows that come in order go there.
        while len(self._runs) > 2 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._join(2)

    def _join(self, num_runs: int) -> None:
        """Makes one of the last runs."""
        rows = np.concatenate([run.rows[run.start : run.end] for run in self._runs[-num_runs:]])
        sequences = np.concatenate([run.sequences[run.start : run.end] for run in self._runs[-num_runs:]])
        is_alive = self._member[rows] == sequences
        self._forget(rows[~is_alive], sequences[~is_alive])
        rows, sequences = rows[is_alive], sequences[is_alive]
        order = np.argsort(sequences, kind="stable")
        joined = _Run()
        joined.append(rows[order], sequences[order])
        self._runs[-num_runs:] = [joined]

    def _bound(self) -> None:
        if sum(len(run) for run in self._runs) > 2 * self._num + _MIN_ROOM:
            self._join(len(self._runs))

    def _forget(self, rows: Rows, sequences: Rows) -> None:
        self._entry[rows[self._entry[rows] == sequences]] = _ABSENT


class _Run:
    """Rows with their sequences, oldest first, in arrays with room behind them.

    Attributes:
        start, end: Which part of the arrays is filled.
    """

    def __init__(self) -> None:
        self.rows: Rows = np.empty(0, np.int64)
        self.sequences: Rows = np.empty(0, np.int64)
        self.start = 0
        self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, rows: Rows, sequences: Rows) -> None:
        """Puts newer rows behind."""
        end = self.end + len(rows)
        if end > len(self.rows):
            num_kept = len(self)
            room = max(2 * (num_kept + len(rows)), _MIN_ROOM)
            for name in ("rows", "sequences"):
                array = np.empty(room, np.int64)
                array[:num_kept] = getattr(self, name)[self.start : self.end]
                setattr(self, name, array)
            self.start, end = 0, num_kept + len(rows)
        self.rows[end - len(rows) : end] = rows
        self.sequences[end - len(rows) : end] = sequences
        self.end = end
