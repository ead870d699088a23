"""Samples of a table: rows are drawn for them, and each is finished once it was sent, or undone.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tdserve.base.errors import EndOfStreamError, InvalidRequestError
from tdserve.messages.row_numbers import NO_ROWS, sort_unique
from tdserve.rules.replay.draws.drawing import Drawing
from tdserve.rules.replay.eligibility.conditional_selectors import MAX_LOOKED_AT
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN, SampleConditions
from tdserve.rules.replay.limiter import LimiterCounts
from tdserve.rules.replay.plans import SamplePlan, SampleTerms
from tdserve.rules.replay.samplers.selector import check_distinct
from tdserve.rules.replay.table_state import TableState


class TableSamples:
    """Decides which rows a sample of a table gets, and whether it must wait for others.

    Args:
        state: State of the table, which its parts share.
    """

    def __init__(self, state: TableState) -> None:
        self._state = state
        self._drawing = Drawing(state.settings, state.columns, state.selectors)
        self._is_drawing = False  # different rows for one sample, in several turns: no other sample gets such meanwhile

    def draw_sample(
        self,
        num_rows: int,
        num_batches: int = 1,
        *,
        rng: np.random.Generator,
        conditions: SampleConditions = PLAIN,
        owner: int | None = None,
        max_drawn: int = 0,
        request: int = 0,
        replaces: bool = False,
        is_apart: bool = False,
        whole_rows: int = 0,
        min_rows: int = 0,
    ) -> SamplePlan | None:
        """Draws rows for some batches at once; returns ``None`` if the limiter makes the caller wait.

        Args:
            num_rows: Rows per batch.
            num_batches: Number of batches; their rows are concatenated in the plan.
            rng: Source of randomness.
            conditions: Conditions of the sample.
            owner: The session that gets the rows on lease; None: no lease, they stay available to others.
            max_drawn: Most rows that are drawn now; a unit such as a slice stays whole, see ``draw_more``; 0: all.
            request: The owner's request, as in ``Leases.grant``.
            replaces: Whether they replace rows that were counted: the limiter has let these through, and does not count
                them again.
            is_apart: Whether all rows must differ, whatever the sampler; of one batch, drawn at once.
            whole_rows: As in ``SampleTerms``; the length of slices follows from it.
            min_rows: On lease, from this many rows on, as many as can be drawn now suffice; 0: all are needed.

        Raises:
            InvalidRequestError: A number is below 1, or more than could ever be drawn at once.
            EndOfStreamError: The table was closed, and no more rows may come or come back for such a sample: of a lease
                all were acknowledged, of others too few are left.
        """
        state = self._state
        for argument, value in (("num_rows", num_rows), ("num_batches", num_batches)):
            if value < 1:
                raise InvalidRequestError(argument=argument, reason=f"{value} is not at least 1")
        total = num_rows * num_batches
        if owner is not None:
            self._check_lease(conditions, min_rows or num_rows)
        counts, limiter = state.counts, state.settings.limiter
        limiter.check_sample(counts.capacity, min_rows or num_rows)
        if state.is_closed and owner is not None:
            num_rows = total = self._count_what_is_left(conditions, total)
        elif min_rows:
            num_rows = total = self._count_drawable(conditions, total)
            if total < min_rows:
                return None
        elif not replaces and not limiter.can_sample(self._fill_if_closed(counts), total):
            self._check_not_over(conditions, num_rows, num_batches)
            return None
        found = len(state.selectors.get(conditions))
        is_too_few = found < (total if is_apart else 1) or self._is_waiting_for_more(conditions, num_rows, found)
        if not total or is_too_few:
            self._check_not_over(conditions, num_rows, num_batches)
            return None
        sampler = state.settings.sampler
        is_lease, is_grouped = owner is not None, bool(conditions.group)
        terms = SampleTerms(
            conditions,
            lease=None if owner is None else (owner, conditions.consumer, request),
            batch_rows=total if is_lease or (sampler.is_independent and not is_grouped) else num_rows,
            is_alone=is_lease or is_grouped or sampler.is_distinct,
            num_clears=state.totals.num_clears,
            is_counted=not replaces,
            is_apart=is_apart and not (is_grouped or sampler.is_distinct),
            whole_rows=whole_rows,
        )
        if terms.is_alone and self._is_drawing:
            return None
        plan = self._draw_part(terms, total, max_drawn or total, rng=rng)
        if plan is None:
            self._check_not_over(conditions, num_rows, num_batches)
            return None
        state.totals.count_samples(total * terms.is_counted)
        return plan

    def draw_more(self, plan: SamplePlan, max_drawn: int, *, rng: np.random.Generator) -> SamplePlan | None:
        """Draws the next rows of a sample that lacks some.

        Returns ``None``, and changes nothing, if they cannot be drawn any more.

        Rows may come and go in between: each is drawn among those of that moment, and the limiter has let all of them
        through at once. Where they must differ from each other, no other such sample is drawn until the last one is.

        Args:
            plan: The previous part.
            max_drawn: Most rows of the next one; units stay whole.
            rng: As in ``draw_sample``.
        """
        return self._draw_part(plan.terms, plan.num_missing, max_drawn, rng=rng)

    def _draw_part(
        self, terms: SampleTerms, num_missing: int, max_drawn: int, *, rng: np.random.Generator
    ) -> SamplePlan | None:
        state = self._state
        num_rows, num_batches, num_drawn = self._choose_next_part(terms, num_missing, max_drawn)
        selector, lease = state.selectors.get(terms.conditions), terms.lease
        if terms.is_apart:
            draw = self._drawing.draw_apart(selector, num_rows, rng=rng)
        elif lease is None:
            draw = self._drawing.draw(
                selector, num_rows, num_batches=num_batches, rng=rng, num_drawn=num_drawn, num_total=terms.num_total
            )
        else:
            draw = self._drawing.draw_distinct(selector, num_rows, rng=rng, num_total=num_missing)
        if draw is None:
            return None
        rows = draw.drawn.rows
        num_missing -= num_rows * num_batches
        if len(rows) < num_rows * num_batches:  # slices that are shorter
            state.totals.uncount_sample((num_rows * num_batches - len(rows)) * terms.is_counted, terms.num_clears)
        if len(draw.spent):
            state.live.remove(draw.spent)  # on their way out: they must not change any more
        if lease is not None:
            owner, consumer, request = lease
            state.selectors.lease(owner, consumer, rows, request=request)
        if terms.is_alone:
            self._is_drawing = num_missing > 0
        plan = SamplePlan(
            rows,
            state.generations[rows],
            draw.drawn.columns,
            draw.spent,
            state.generations[draw.spent],
            terms=terms,
            num_missing=num_missing,
            sequence=state.columns.sequence[rows],
        )
        if len(plan.spent):
            state.under_way.add(plan)
        return plan

    def _choose_next_part(self, terms: SampleTerms, num_missing: int, max_drawn: int) -> tuple[int, int, int]:
        """Returns the rows of the next part of a batch, how many batches are drawn together, and how many rows of the
        batch were drawn before."""
        state = self._state
        batch_rows, num_drawn = terms.batch_rows, -num_missing % terms.batch_rows
        if not num_drawn and batch_rows <= max_drawn:
            return batch_rows, min(max_drawn, num_missing) // batch_rows, 0
        unit = terms.conditions.group_size or state.settings.sampler.compute_unit(terms.num_total, state.ring.capacity)
        return min(max(max_drawn // unit, 1) * unit, batch_rows - num_drawn), 1, num_drawn

    def finish(self, plan: SamplePlan) -> bool:
        """Ends a sample, or a part of one, that was sent; returns whether rows have left the table for it."""
        state = self._state
        if not len(plan.spent):
            return False
        state.under_way.discard(plan)
        state.remove(plan.spent[state.generations[plan.spent] == plan.spent_generations])
        return True

    def leave_to_draw(self, plan: SamplePlan) -> None:
        """Ends a sample whose rows a kept draw has from now on; those that it spent leave with that."""
        self._state.under_way.discard(plan)

    def undo(self, plan: SamplePlan) -> None:
        """Undoes a sample that could not be sent: what it used up is available again."""
        for _ in self.undo_in_parts([plan]):
            pass

    def undo_in_parts(self, plans: Sequence[SamplePlan]) -> Iterator[None]:
        """Like :meth:`undo`, of the parts of one sample, one at a time; between two parts rows may come and go."""
        state = self._state
        last, terms = plans[-1], plans[-1].terms
        state.totals.uncount_sample(
            (sum(len(plan.rows) for plan in plans) + last.num_missing) * terms.is_counted, terms.num_clears
        )
        for plan in plans:
            state.under_way.discard(plan)
            back = plan.spent[state.generations[plan.spent] == plan.spent_generations]
            state.live.add(back)
            self._drawing.undo(plan.rows[state.columns.sequence[plan.rows] == plan.sequence], back)
            state.renew_evictable(back)
            if terms.lease is not None:
                owner, consumer, request = terms.lease
                is_held = state.selectors.leases.find_held(owner, plan.rows, consumer, request=request)
                state.selectors.give_back(owner, consumer, plan.rows[is_held])
            if plan is not last:
                yield
        if terms.is_alone and last.num_missing:
            self._is_drawing = False

    def check_consumer(self, consumer: str, *, is_lease: bool) -> None:
        """Raises InvalidRequestError if the table's consumers were named when it was created, and this is another
        one."""
        state = self._state
        consumers = state.settings.consumers
        if consumers and consumer not in consumers and (is_lease or consumer != OWN):
            names = ", ".join(map(repr, consumers))
            reason = (
                f"rows of table {state.name!r} leave it once {names} have had them; {consumer!r} is not one of these"
            )
            raise InvalidRequestError(argument="consumer", reason=reason)

    def _check_lease(self, conditions: SampleConditions, num_rows: int) -> None:
        state = self._state
        check_distinct(num_rows, state.ring.capacity)
        reason = ""
        if state.columns.trajectories is not None and not conditions.group:
            reason = f"table {state.name!r} samples slices, whose rows belong together"
        elif state.settings.max_times_sampled:
            reason = (
                f"rows of table {state.name!r} leave it by max_times_sampled, not when they are acknowledged; sample"
                " without a consumer, or create the table with consumers= instead of max_times_sampled"
            )
        if reason:
            raise InvalidRequestError(argument="consumer", reason=reason)

    def _is_waiting_for_more(self, conditions: SampleConditions, num_rows: int, num_members: int) -> bool:
        """Returns whether the sampler would refuse that many rows although more may come: rows that are young enough,
        or that are being written. Of a closed table the end is told from that."""
        state = self._state
        if not state.settings.sampler.keeps_epoch or conditions.group:
            return False
        if state.is_closed:
            return num_members < num_rows
        most = num_members + state.ring.num_held if conditions.max_lag is None else state.ring.capacity
        return num_members < num_rows <= most

    def _fill_if_closed(self, counts: LimiterCounts) -> LimiterCounts:
        """Returns the counts for which a limiter decides about a sample: for more rows than a closed table has, no
        sample waits."""
        return replace(counts, num_rows=counts.capacity) if self._state.is_closed else counts

    def _check_not_over(self, conditions: SampleConditions, num_rows: int, num_batches: int) -> None:
        """Raises EndOfStreamError if what a batch waits for cannot come any more. Of several, one may be drawn yet."""
        state = self._state
        if num_batches == 1 and self.is_final(conditions):
            num_left = state.selectors.get(conditions).num_drawable
            num_needed = num_rows if num_rows > num_left else 0  # otherwise it is the limiter that keeps them
            raise EndOfStreamError(name=state.name, num_left=num_left, num_needed=num_needed)

    def _count_what_is_left(self, conditions: SampleConditions, num_rows: int) -> int:
        state = self._state
        num_left = state.selectors.get(conditions).num_drawable
        if not num_left and self.is_final(conditions):
            raise EndOfStreamError(name=state.name)
        return min(num_rows, num_left)

    def _count_drawable(self, conditions: SampleConditions, most: int) -> int:
        """Returns how many rows can be drawn now, at most this many: of groups, whole ones."""
        state = self._state
        counts, limiter, unit = state.counts, state.settings.limiter, conditions.group_size or 1
        units = range(1, min(most, state.selectors.get(conditions).num_drawable) // unit + 1)
        return unit * bisect_left(units, True, key=lambda number: not limiter.can_sample(counts, number * unit))

    def is_final(self, conditions: SampleConditions) -> bool:
        """Returns whether the table is closed, and a sample finds no other rows later than it does now: none is being
        written, lacks only leaves or a priority, is on lease to the same consumer, or was spent by a sample that may
        still be undone."""
        state = self._state
        if not state.is_closed or state.ring.num_held or state.ring.num_reserved or state.num_coming or state.under_way:
            return False
        is_any_leased = state.selectors.leases.count_leased(conditions.consumer)
        is_any_barred = bool(state.selectors.get(conditions).explain_none())
        return not (is_any_leased or is_any_barred or state.selectors.may_complete(conditions))

    def count_draws(self, conditions: SampleConditions) -> int:
        """Returns how often rows can be drawn, all together, until they leave the table by ``max_times_sampled``."""
        state = self._state
        rows = state.selectors.find_members(conditions)
        return int((state.settings.max_times_sampled - state.columns.times_sampled[rows]).sum())

    def explain_sample(self, num_rows: int, conditions: SampleConditions = PLAIN, *, names: Sequence[str] = ()) -> str:
        """Returns what a sample waits for now, for the error when it has waited too long.

        Args:
            names: Names of the leaves of a row, by their numbers; with () the error names no missing leaf.
        """
        state = self._state
        counts = state.counts
        if not state.settings.limiter.can_sample(counts, num_rows):
            return state.settings.limiter.explain_sample(counts, state.name, num_rows)
        missing = state.selectors.describe_missing(conditions, names) if names else ""
        reason = state.selectors.get(conditions).explain_none() or conditions.describe(
            has_partial_rows=state.selectors.has_partial_rows, missing=missing
        )
        leased = f"{num_leased} are on lease" if (num_leased := state.selectors.leases.num_leased) else ""
        held = ", ".join(filter(None, (leased, self.describe_kept(conditions.consumer))))
        shown = f" ({held})" if held else ""
        return f"a sample of {num_rows} rows of table {state.name!r}, of whose {counts.num_rows} rows {reason}{shown},"

    def describe_kept(self, consumer: str, *, max_rows: int = MAX_LOOKED_AT) -> str:
        """Returns how many rows a consumer has had that draws keep in the table; "" if none are.

        Args:
            max_rows: Most rows that are looked at.
        """
        state = self._state
        if consumer == OWN or not state.ring.pins:
            return ""
        rows = np.concatenate([NO_ROWS, *(draw.rows[: max_rows + 1] for draw in state.draws)])
        more = "at least " if len(rows) > max_rows else ""
        rows = state.live.select_members(sort_unique(rows[:max_rows]))
        num_had = state.selectors.consumers.count_had(consumer, rows[state.ring.pins.contains(rows)])
        return f"{more}{num_had} that {consumer!r} has had are kept for the ranks of a step" if num_had else ""
