"""The draws of a table for data-parallel readers, kept by their steps: each rank reads its share, as often as it asks.

A table keeps a bounded number of draws. Their rows are pinned, so that a late rank, or one that was restarted, finds
what the others have had. Steps up to a *horizon* are forgotten, unless they are kept: nothing is drawn for them again.

Each run, a job with a name, has its own steps and horizon. Once a rank of one run asks, draws of all others are over:
they are forgotten as soon as their rows are needed, or there are too many draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from tdserve.base.errors import InvalidRequestError, StepForgottenError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.draws.kept_draw import DrawTerms, KeptDraw

MAX_KEPT_DRAWS = 16
"""Most draws that a table keeps: ranks that prefetch steps, and one that was restarted behind them, find theirs."""

MAX_RUNS = 16
"""Most runs whose horizons a table keeps: those that have drawn last."""

BEFORE_FIRST = -1
"""The horizon of a run of which no step is forgotten."""


_NUMBERED = frozenset({"require", "group_by"})
"""Terms whose values are the table's own numbers of the caller's keys."""


class PinnableRows(Protocol):
    """What is used of a table here; see its methods."""

    def get_row_ids(self, rows: Rows) -> Rows:
        """Returns what identifies the rows now."""

    def pin(self, rows: Rows) -> None:
        """Keeps rows from being overwritten."""

    def unpin(self, rows: Rows) -> None:
        """Ends one pin of rows."""

    def spend(self, rows: Rows) -> None:
        """Makes rows unavailable that are on their way out."""

    def remove(self, rows: Rows) -> None:
        """Removes rows."""

    def consume(self, consumer: str, rows: Rows) -> None:
        """Notes that a consumer has had rows."""


class KeptDraws:
    """The kept draws of one table, by step.

    Args:
        table: Name of the table, for errors.
        horizons: Runs and the largest step of each that is forgotten; the run that has drawn last comes last.

    Attributes:
        erasable: Runs and steps whose records are of no use any more.
        changed: Runs and steps of draws that have changed since they were recorded.
    """

    def __init__(self, table: str, *, horizons: Iterable[tuple[str, int]] = ()) -> None:
        self._table = table
        self.erasable: list[tuple[str, int]] = []
        self.changed: set[tuple[str, int]] = set()
        self._horizons = dict(horizons)
        self._draws: dict[tuple[str, int], KeptDraw] = {}

    def __len__(self) -> int:
        return len(self._draws)

    def __iter__(self) -> Iterator[KeptDraw]:
        """Yields the draws: those of the run that has drawn last come last, and of each run lower steps first."""
        ages = {run: age for age, run in enumerate(self._horizons)}
        return iter(sorted(self._draws.values(), key=lambda draw: (ages[draw.terms.run], draw.step)))

    def __repr__(self) -> str:
        return f"<KeptDraws of runs and steps {[*self._draws]}, up to {self._horizons} forgotten>"

    @property
    def horizons(self) -> list[tuple[str, int]]:
        """Returns the runs, with the largest step of each that is forgotten."""
        return [*self._horizons.items()]

    @property
    def num_spent(self) -> int:
        """Returns the number of rows that leave the table once their draw is forgotten."""
        return sum(len(draw.spent) for draw in self._draws.values())

    def find(self, step: int, terms: DrawTerms) -> KeptDraw | None:
        """Returns the draw of a step; None if nothing was drawn for it yet.

        Raises:
            InvalidRequestError: It was drawn under other terms. The error names the first that differs.
            StepForgottenError: It was forgotten, or would be as soon as it is drawn.
        """
        draw = self._draws.get((terms.run, step))
        if draw is not None:
            self._check_same(draw, terms)
            return draw
        horizon = self._horizons.get(terms.run, BEFORE_FIRST)
        if step <= horizon or self._has_only_later(terms.run, step):
            steps = sorted(step for run, step in self._draws if run == terms.run)
            kept = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise StepForgottenError(store=self._table, step=step, kept=kept, next=max((horizon, *steps)) + 1)
        return None

    def _has_only_later(self, run: str, step: int) -> bool:
        """Returns whether as many draws are kept as can be, all of this run and of later steps: one more would be the
        first to be forgotten, before a second rank could have its share."""
        is_full = len(self._draws) >= MAX_KEPT_DRAWS
        return is_full and all(other == run and step < kept for other, kept in self._draws)

    def _check_same(self, draw: KeptDraw, terms: DrawTerms) -> None:
        kept, asked = _name_terms(draw.terms), _name_terms(terms)
        for name, value in kept.items():
            if asked[name] != value:
                difference = _describe_difference(name, value, asked[name])
                reason = f"step {draw.step} of table {self._table!r} was drawn {difference}"
                raise InvalidRequestError(argument=name, reason=reason + "; all ranks of a step ask for the same")

    def note_asked(self, rank: int, step: int, world_size: int, run: str = "") -> bool:
        """Notes that a rank asks for a step; returns whether another draw is over by that. Those of other runs are, and
        where the number of ranks has changed, all earlier ones."""
        is_any_over = False
        for draw in self._draws.values():
            is_other_run = draw.terms.run != run
            if (is_other_run or draw.step < step) and not draw.is_over:
                is_other = is_other_run or draw.terms.world_size != world_size
                draw.ranks_beyond.update(range(draw.terms.world_size) if is_other else (rank,))
                is_any_over |= draw.is_over
        return is_any_over

    def keep(self, draw: KeptDraw, rows: PinnableRows) -> None:
        """Keeps a draw: no writer gets its rows until it is forgotten. Forgets the first if there are too many."""
        rows.pin(draw.rows)
        run = draw.terms.run
        self._draws[run, draw.step] = draw
        self._horizons[run] = self._horizons.pop(run, BEFORE_FIRST)  # behind all others
        if len(self._draws) > MAX_KEPT_DRAWS:
            self._forget_draw(next(iter(self)), rows)
        if len(self._horizons) > MAX_RUNS:
            used = {run for run, _ in self._draws}
            del self._horizons[next(run for run in self._horizons if run not in used)]

    def withdraw(self, draw: KeptDraw, rows: PinnableRows) -> None:
        """Undoes :meth:`keep`: the step may be drawn again."""
        del self._draws[draw.terms.run, draw.step]
        rows.unpin(draw.rows)

    def restore(self, draws: Iterable[KeptDraw], rows: PinnableRows) -> None:
        """Keeps draws again after a restart, or in a copy; forgets those of which no row is left.

        The shares that have lost a row end, and no others: see :func:`plan_share`.
        """
        for draw in draws:
            is_left = rows.get_row_ids(draw.rows) == draw.row_ids
            if not is_left.any():
                self._note_forgotten(draw)
                continue
            is_spent = rows.get_row_ids(draw.spent) == draw.spent_ids
            draw.spent, draw.spent_ids = draw.spent[is_spent], draw.spent_ids[is_spent]
            if len(draw.spent):
                rows.spend(draw.spent)
            left = draw.rows[is_left]
            rows.consume(draw.terms.conditions.consumer, left)
            rows.pin(left)
            self._horizons.setdefault(draw.terms.run, BEFORE_FIRST)
            self._draws[draw.terms.run, draw.step] = draw

    def list_changed(self) -> list[KeptDraw]:
        """Returns those that have changed since they were recorded, and are still kept."""
        return [self._draws[key] for key in self.changed if key in self._draws]

    def forget_over(self, rows: PinnableRows) -> bool:
        """Forgets the first draw, of the run that has drawn least recently, if it is over; returns whether it was."""
        first = next(iter(self), None)
        if first is None or not first.is_over:
            return False
        self._forget_draw(first, rows)
        return True

    def forget_all(self, rows: PinnableRows, *, restarts: bool = False) -> None:
        """Forgets all draws; with ``restarts`` every run may begin at step 0."""
        for draw in self:
            self._forget_draw(draw, rows)
        if restarts:
            self._horizons.clear()

    def _forget_draw(self, draw: KeptDraw, rows: PinnableRows) -> None:
        """Forgets a draw. Rows that it spent leave the table, or do so with another draw that has them."""
        del self._draws[draw.terms.run, draw.step]
        self._note_forgotten(draw)
        is_same = rows.get_row_ids(draw.rows) == draw.row_ids
        rows.unpin(draw.rows[is_same])
        self._release_spent(draw, rows)

    def _release_spent(self, draw: KeptDraw, rows: PinnableRows) -> None:
        """Lets rows that a forgotten draw has spent leave the table, or leaves them to another draw that has them."""
        is_there = rows.get_row_ids(draw.spent) == draw.spent_ids
        spent, ids = draw.spent[is_there], draw.spent_ids[is_there]
        for key, other in self._draws.items():
            is_shared = np.isin(spent, other.rows)
            if is_shared.any():
                other.spent = np.concatenate((other.spent, spent[is_shared]))
                other.spent_ids = np.concatenate((other.spent_ids, ids[is_shared]))
                self.changed.add(key)
                spent, ids = spent[~is_shared], ids[~is_shared]
        if len(spent):
            rows.remove(spent)

    def _note_forgotten(self, draw: KeptDraw) -> None:
        run = draw.terms.run
        self._horizons[run] = max(self._horizons.get(run, BEFORE_FIRST), draw.step)
        self.erasable.append((run, draw.step))


def _name_terms(terms: DrawTerms) -> dict[str, Any]:
    """Returns the terms by the names of the caller's arguments."""
    require, consumer, group, group_size, max_lag = terms.conditions
    return {
        "world_size": terms.world_size,
        "num_rows": terms.num_rows,
        "balance": terms.balance,
        "require": require,
        "consumer": consumer,
        "group_by": group,
        "group_size": group_size,
        "max_lag": max_lag,
    }


def _describe_difference(name: str, kept: Any, asked: Any) -> str:
    if name in _NUMBERED:
        return f"with another {name}"
    return f"{_describe_term(name, kept)}, not {_describe_term(name, asked)}"


def _describe_term(name: str, value: Any) -> str:
    if value is None or value in ("", ()):
        return f"without {name}"
    return f"with {name}={value[0] if name == 'balance' and len(value) == 1 else value!r}"
