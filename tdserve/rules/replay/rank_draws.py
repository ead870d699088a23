"""Draws the rows of all ranks of a step at once, and plans what each of them reads."""

from __future__ import annotations

import numpy as np

from tdserve.base.errors import InvalidRequestError, LocalProtocolError, WrongStateError
from tdserve.rules.replay.draws.kept_draw import DrawTerms, KeptDraw
from tdserve.rules.replay.plans import RowsPlan, SamplePlan
from tdserve.rules.replay.table import Table

MAX_DRAWN_ROWS = 1 << 17
"""Most rows of one draw: they are drawn in one turn, which takes some tens of milliseconds for that many."""


class RankDraw:
    """A draw that was just made, and is settled or undone in the same turn.

    Args:
        table: The table.
        plan: Its rows.
        draw: The draw, which the table keeps.

    Attributes:
        plan, draw: As above.
    """

    def __init__(self, table: Table, plan: SamplePlan, draw: KeptDraw) -> None:
        self._table = table
        self.plan = plan
        self.draw = draw

    @classmethod
    def make(cls, table: Table, step: int, terms: DrawTerms, *, rng: np.random.Generator) -> RankDraw | None:
        """Draws different rows for all ranks, which the table keeps from now on; None if that must wait.

        Raises:
            InvalidRequestError: No draw on these terms is possible. Nothing was changed.
        """
        _check_terms(table, terms)
        plan = _draw_apart(table, terms, rng)
        if plan is not None and table.claims:  # a writer may have claimed some of these rows by itself
            table.samples.undo(plan)
            table.state.take_back_claims()
            plan = _draw_apart(table, terms, rng)
        if plan is None:
            return None
        if (table.state.get_row_ids(plan.rows) & 1).any():  # what was claimed is not known while the disk is full
            table.samples.undo(plan)
            return None
        row_ids, spent_ids = table.state.get_row_ids(plan.rows), table.state.get_row_ids(plan.spent)
        draw = KeptDraw(step, terms, plan.rows, row_ids, plan.columns, plan.spent, spent_ids)
        table.draws.keep(draw, table.state)
        table.samples.leave_to_draw(plan)
        return cls(table, plan, draw)

    def settle(self) -> None:
        """Ends the draw, which is on record now: its consumer has had the rows."""
        self._table.state.consume(self.draw.terms.conditions.consumer, self.draw.rows)

    def undo(self) -> None:
        """Undoes the draw: what it used up is available again, and the step may be drawn."""
        self._table.draws.withdraw(self.draw, self._table.state)
        self._table.samples.undo(self.plan)


def plan_share(table: Table, draw: KeptDraw, rank: int) -> RowsPlan:
    """Plans to read what a rank gets of a draw, which does not count as a sample.

    Raises:
        WrongStateError: Some of these rows were deleted since.
    """
    if draw.shares is None:
        raise LocalProtocolError(reason=f"step {draw.step} was not dealt yet")
    share = draw.shares[rank]
    rows = draw.rows[share]
    num_gone = int(np.count_nonzero(table.state.get_row_ids(rows) != draw.row_ids[share]))
    if num_gone:
        state = f"{num_gone} of its {len(rows)} rows of table {table.name!r} are deleted"
        raise WrongStateError(state=state, event=f"reading the share of rank {rank} in step {draw.step}")
    return table.plan_rows(rows, {name: column[share] for name, column in draw.columns.items()})


def _draw_apart(table: Table, terms: DrawTerms, rng: np.random.Generator) -> SamplePlan | None:
    return table.samples.draw_sample(terms.num_drawn, rng=rng, conditions=terms.conditions, is_apart=True)


def _check_terms(table: Table, terms: DrawTerms) -> None:
    most = min(table.ring.capacity, MAX_DRAWN_ROWS)
    if terms.num_drawn > most:
        reason = f"{terms.num_rows} rows for each of {terms.world_size} ranks are more than {most} different rows"
        raise InvalidRequestError(argument="num_rows", reason=reason)
    group_size = terms.conditions.group_size
    if table.columns.trajectories is not None and not group_size:
        reason = f"table {table.name!r} samples slices, which may have rows in common"
        raise InvalidRequestError(argument="rank", reason=reason)
    if group_size and terms.num_rows % group_size:
        reason = f"{terms.num_rows} rows per rank are not a whole number of groups of {group_size}"
        raise InvalidRequestError(argument="num_rows", reason=reason)
