"""Rows that leave a table since they are too old or were sampled for the last time, and rows that are kept in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tdserve.messages.row_numbers import PIECE_ROWS, Rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay import promises
from tdserve.rules.replay.aging_table import AgingTable
from tdserve.rules.replay.conditions import OWN
from tdserve.rules.replay.staleness import UNKNOWN


class Departures(AgingTable):
    """A table of which rows are discarded, spent, or kept for readers.

    Arguments and errors as of ``TableState``.
    """

    def make_way(self, num_rows: int) -> None:
        """Prepares the table for another writer: takes back the claim of a sole writer, and promises too if the others
        would leave no room. Draws that are over are forgotten if their rows are needed."""
        while self.ring.pins and num_rows <= self.ring.capacity and not self.ring.has_room(num_rows):
            if not self.draws.forget_over(self):
                break
        for claims in tuple(self.claims):
            if not claims.is_block or promises.is_far_behind(self.ring, claims.promised):
                claims.take_back()
        if promises.must_end(self.ring, num_rows):
            self.take_back_claims()

    def discard(self, max_lag: int, *, group: str = "") -> int:
        """Removes rows whose lag is above ``max_lag``, and returns how many; as :meth:`discard_in_pieces`."""
        return sum(self.discard_in_pieces(max_lag, group=group)) if self._count_too_old(max_lag) else 0

    def discard_in_pieces(self, max_lag: int, *, group: str = "") -> Iterator[int]:
        """Removes rows whose lag is above ``max_lag``, except rows on lease and those of kept draws, a piece at a time:
        between two pieces rows may come and go.

        Args:
            group: Name of a column: a group with such a row leaves whole. "": the rows leave alone.
        """
        staleness = self.selectors.staleness
        if staleness is None:
            return
        floor = staleness.compute_floor(max_lag)
        old: Iterable[Rows] = staleness.iter_pieces(UNKNOWN, floor, piece_rows=PIECE_ROWS // 4)
        if group:
            ids = self.columns.get_array(group, np.int64)
            found = np.unique(ids[self._drop_kept(staleness.find_between(UNKNOWN, floor))])
            everything = self.iter_steps(RowSet.run(0, self.ring.num_used).iter_pieces())
            old = (self._live.select_members(rows[np.isin(ids[rows], found)]) for rows in everything)
        for rows in old:
            leaving = self._drop_kept(rows)
            if len(leaving):
                self.remove(leaving)
                staleness.num_discarded += len(leaving)
            yield len(leaving)
        self.num_spared = self._count_too_old(max_lag)

    def _drop_kept(self, rows: Rows) -> Rows:
        """Returns those of the rows that are neither on lease nor in a kept draw."""
        if self.ring.pins:
            rows = rows[~self.ring.pins.contains(rows)]
        return rows[~self.selectors.leases.holds(rows)] if self.selectors.leases.num_leased else rows

    def num_too_old(self, max_lag: int) -> int:
        """Returns the number of rows that are too old, minus those that the last :meth:`discard` spared."""
        num_rows = self._count_too_old(max_lag)
        self.num_spared = min(self.num_spared, num_rows)  # others have left since
        return num_rows - self.num_spared

    def _count_too_old(self, max_lag: int) -> int:
        staleness = self.selectors.staleness
        return 0 if staleness is None else staleness.count(UNKNOWN, staleness.compute_floor(max_lag))

    def get_names(self, rows: Rows) -> Rows:
        """See :meth:`Ring.get_names`."""
        return self.ring.get_names(rows)

    def pin(self, rows: Rows) -> None:
        """Keeps live rows, each named once, from being overwritten until :meth:`unpin`; no claims of writers remain."""
        self.take_back_claims()
        self.ring.pins.add(rows)
        if self._evictor is not None:
            self._evictor.remove(rows)

    def unpin(self, rows: Rows) -> None:
        """Ends one :meth:`pin` of rows that have not left since."""
        loose = self.ring.pins.remove(rows)
        if self._evictor is not None:
            self._evictor.add(loose[self._live.contains(loose) & ~self.ring.is_held(loose)])

    def consume(self, consumer: str, rows: Rows) -> None:
        """Notes that a named consumer has had rows, each named once."""
        if consumer != OWN:
            self.selectors.consume(consumer, rows)

    def spend(self, rows: Rows) -> None:
        """Makes rows unavailable that were sampled for the last time: they are on their way out."""
        self._live.remove(rows)
        self.selectors.leave(rows)
        self.columns.times_sampled[rows] = self.settings.max_times_sampled
