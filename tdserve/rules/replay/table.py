"""The decisions of a replay table: its parts together, and what concerns the table as a whole. The caller handles
content and waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.departures import Departures
from tdserve.rules.replay.limiter import Limiter, LimiterCounts
from tdserve.rules.replay.plans import RowsPlan, check_priorities
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table_arrivals import TableArrivals
from tdserve.rules.replay.table_leases import TableLeases
from tdserve.rules.replay.table_samples import TableSamples
from tdserve.rules.replay.table_state import TableState


class Table:
    """Decides for one replay table. Each part of it decides about one thing; the state is what they share, and has no
    reference to any of them. A caller that gets ``None`` from a part waits until something has changed, and asks again.

    Args:
        state: State of the table, new or restored; it is of this table alone.

    Attributes:
        state: As above: the rows of the table.
        arrivals: How rows come.
        samples: How they are drawn.
        leases: How rows on lease are acknowledged, renewed and given back.
        departures: How rows leave.
        name, ring, columns, selectors, order, claims, draws, totals, ages, shared: Those of the state; they stay the
            same objects.
    """

    def __init__(self, state: TableState) -> None:
        self.state = state
        self.arrivals, self.samples = TableArrivals(state), TableSamples(state)
        self.leases, self.departures = TableLeases(state), Departures(state)
        self.name = state.name
        self.ring, self.columns, self.selectors, self.order = state.ring, state.columns, state.selectors, state.order
        self.claims, self.draws, self.totals = state.claims, state.draws, state.totals
        self.ages, self.shared = state.ages, state.shared

    def __len__(self) -> int:
        """Returns the number of rows, without those that leave as soon as their draw is forgotten."""
        return len(self.state)

    def __repr__(self) -> str:
        return f"<Table {self.name!r} {self.ring!r}>"

    @property
    def settings(self) -> Settings:
        """Returns the sampler, remover and limiter, as they are now."""
        return self.state.settings

    @property
    def is_closed(self) -> bool:
        """Returns whether the table accepts no more rows."""
        return self.state.is_closed

    @property
    def counts(self) -> LimiterCounts:
        """Returns the counts for the limiter."""
        return self.state.counts

    def close(self) -> None:
        """Closes the table: it accepts no more rows; those that are here can still be taken."""
        state = self.state
        state.take_back_claims()
        state.is_closed = True

    def set_limiter(self, limiter: Limiter) -> None:
        """Replaces the limiter.

        Raises:
            InvalidRequestError: It could never let any row through. Nothing was changed.
        """
        self.state.change_settings(self.state.settings.with_limiter(limiter))

    def set_sampler(self, sampler: Sampler) -> None:
        """Replaces parameters of the sampler.

        Raises:
            InvalidRequestError: It is another sampler, or has a parameter that cannot change. Nothing was changed.
        """
        state = self.state
        state.change_settings(state.settings.with_sampler(sampler))
        state.selectors.set_sampler(state.settings)

    def info(self) -> dict[str, int | str]:
        """Returns figures for users and statistics."""
        state = self.state
        return {
            "num_rows": len(self),
            "capacity": state.ring.capacity,
            "num_held": state.ring.num_held,
            "num_reserved": state.ring.num_reserved,
            "num_holes": state.ring.num_holes,
            "num_leased": state.selectors.leases.num_leased,
            "cursor": state.ring.cursor,
            "inserts": state.totals.inserts,
            "samples": state.totals.num_samples,
            "settings": state.settings.to_json(),
        }

    def update_priority(
        self,
        rows: Rows,
        priorities: NDArray[np.float64],
        generations: NDArray[np.uint32] | None,
        *,
        skips_gone: bool = False,
    ) -> int:
        """Sets the priorities of rows; if a row is named twice, the last one counts.

        Args:
            priorities: One per row.
            generations: Lower halves; rows that have another one now are skipped. None: all rows must be live.
            skips_gone: They were checked before, in another turn: rows that are not live any more are skipped.

        Returns:
            Number of skipped rows.

        Raises:
            InvalidRequestError: A priority is negative or not finite, or the table has none. Nothing was changed.
            SelectionError: A row is out of range, or not live. Nothing was changed.
        """
        state = self.state
        if skips_gone and generations is None:
            is_same = state.live.contains(rows)
        elif generations is None:
            self.check_update(rows, priorities, generations)
            is_same = np.ones(len(rows), np.bool_)
        else:
            self.check_update(rows, priorities, generations)
            is_same = state.is_same(rows, generations) & state.live.contains(rows)
        self._set_priorities(rows[is_same], priorities[is_same])
        return int(np.count_nonzero(~is_same))

    def check_update(self, rows: Rows, priorities: NDArray[Any], generations: NDArray[np.uint32] | None) -> None:
        """Raises as ``update_priority`` does, and changes nothing."""
        state = self.state
        state.settings.check_uses_priority(state.name)
        check_priorities(priorities)
        if generations is None:
            state.check_live(rows)
        else:
            state.check_numbers(rows)

    def get_priorities(self, rows: Rows) -> NDArray[np.float64]:
        """Returns the priorities of rows. Raises as ``update_priority`` does."""
        state = self.state
        self.check_update(rows, np.zeros(0), None)
        state.check_live(rows)
        return state.columns.priority[rows]

    def get_sequences(self, rows: Rows) -> Rows:
        """Returns the sequences of rows, see :mod:`tdserve.rules.replay.row_indexes.row_order`: even where a row still
        continues the row before it. Of rows that are not live they are not defined.

        Raises:
            SelectionError: A row is out of range.
        """
        state = self.state
        state.check_numbers(rows)
        return state.columns.sequence[rows] | ~state.order.find_continuing(rows)

    def _set_priorities(self, rows: Rows, priorities: NDArray[np.float64]) -> None:
        state = self.state
        if not len(rows):
            return
        state.columns.priority[rows] = priorities
        state.highest_priority = max(state.highest_priority, float(priorities.max()))
        rows = sort_unique(rows)
        state.selectors.update(rows)
        if state.evictor is not None:
            state.evictor.update(rows)

    def plan_read(self, rows: Rows) -> RowsPlan:
        """Plans a read of live rows by number, which does not count as a sample.

        Args:
            rows: Row numbers, as ``extend`` returned them; negative ones do not count from the end.

        Raises:
            SelectionError: A row is out of range, or not live: never written, or being overwritten.
        """
        self.state.check_live(rows)
        return self.plan_rows(rows, {})

    def plan_rows(self, rows: Rows, columns: Mapping[str, NDArray[Any]]) -> RowsPlan:
        """Plans a read of rows as they are, with these columns; also of rows that are on their way out."""
        return RowsPlan(rows, self.state.generations[rows], columns)
