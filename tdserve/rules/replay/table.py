"""The decisions of a replay table: ring, samplers, limiter and counters together. The caller handles content and
waits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import EndOfStreamError, InvalidRequestError, WrongStateError
from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.departures import Departures
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN, SampleConditions
from tdserve.rules.replay.limiter import LimiterCounts
from tdserve.rules.replay.plans import (
    PLAIN_ARRIVAL,
    Arrival,
    RowsPlan,
    SamplePlan,
    SampleTerms,
    check_priorities,
)
from tdserve.rules.replay.row_indexes.live_rows import compact
from tdserve.rules.replay.samplers.selector import check_distinct


class Table(Departures):
    """Decides for one replay table. A caller that gets ``None`` waits until something has changed, and asks again.

    Arguments and errors as in ``TableState``.
    """

    # ------------------------------------------------------------ writing

    def reserve(self, num_rows: int) -> Reservation | None:
        """Makes way, and reserves rows for a writer; returns ``None`` if it must wait. The rows are out of every sample
        from now on.

        Raises:
            InvalidRequestError: ``num_rows`` is below 1, or more than the limiter could ever let in at once.
            TooLargeError: ``num_rows`` is above the capacity.
            WrongStateError: The table was closed.
        """
        self.make_way(num_rows)
        return self.reserve_part(num_rows) if self._may_extend(num_rows) else None

    def begin_reserving(self, num_rows: int) -> bool:
        """Makes way, and returns whether a writer may have ``num_rows`` now. If so, it gets them by
        :meth:`reserve_part`, and until :meth:`end_reserving` no other writer gets more. Errors as in
        :meth:`reserve`."""
        self.make_way(num_rows)
        may_extend = self._may_extend(num_rows)
        self._is_reserving |= may_extend
        return may_extend

    def end_reserving(self) -> None:
        """Ends :meth:`begin_reserving`: the writer has its rows, or does not need them any more."""
        self._is_reserving = False

    def _may_extend(self, num_rows: int) -> bool:
        if self.is_closed:
            raise WrongStateError(state=f"{self.name!r} is closed", event="an extend")
        has_room = self.ring.has_room(num_rows)
        limiter, counts = self.settings.limiter, self.counts
        limiter.check_insert(counts.capacity, num_rows)
        return has_room and not self._is_reserving and limiter.can_insert(counts, num_rows)

    def reserve_part(self, num_rows: int) -> Reservation | None:
        """Reserves some of the rows that a writer may have; returns ``None`` while others hold or fill too many, or too
        many are kept for ranks. Draws that are over are forgotten if their rows are needed."""
        self._forget_draws(num_rows, self.ring.has_room)  # others may have been drawn since the first part
        if self._evictor is not None and num_rows > self.ring.num_free:
            missing = num_rows - self.ring.num_free
            if missing > len(self._evictor):  # the others are held
                return None
            self.remove(self._evictor.find_first(missing))
        reservation = self.ring.reserve(num_rows)
        if reservation is not None and len(reservation.evicted):
            self._leave(reservation.evicted)
        return reservation

    def arrive(self, rows: Rows, arrival: Arrival = PLAIN_ARRIVAL, *, is_on_record_later: bool = False) -> None:
        """Records the data of a writer's rows; followed by :meth:`commit` or :meth:`take_back`.

        Args:
            is_on_record_later: Whether their commit comes in another turn; until :meth:`forget_arriving` the state has
                their places in the order of commits.
        """
        columns = self.columns
        if is_on_record_later:
            before = self.order.last_sequence
            self._arriving.append((before, before + 2 * len(rows)))
        where = compact(rows)
        self.order.append(rows, where, arrival.writers or ((arrival.writer, len(rows)),))
        if self._counts_samples:
            columns.times_sampled[where] = 0
        if self._uses_priority:
            if arrival.priorities is None:
                columns.priority[where] = self._highest
            else:
                columns.priority[where] = arrival.priorities
                self._highest = max(self._highest, float(arrival.priorities.max()))
        for name, ids in arrival.groups.items():
            columns.get_array(name, np.int64)[where] = ids
        if self.selectors.staleness is not None:
            self.selectors.staleness.arrive(rows, arrival.policy_versions)
        self.selectors.arrive(rows, arrival.keys)
        if arrival.keys is not None:
            self._permit_readers()
        if self.columns.trajectories is not None:
            self.columns.trajectories.append(rows, writer=arrival.writer, ends=arrival.ends, ids=arrival.ids)

    def take_back(self, rows: Rows, arrival: Arrival = PLAIN_ARRIVAL) -> None:
        """Undoes what the last :meth:`arrive` of this writer did to its trajectories, for rows that are not committed
        after all."""
        if self.columns.trajectories is not None:
            self.columns.trajectories.take_back(rows, writer=arrival.writer, ids=arrival.ids)

    def forget_arriving(self) -> None:
        """Drops the arrived rows from the state: they are put on record in this turn, or given up."""
        self._arriving.clear()

    def commit(self, reservation: Reservation) -> Rows:
        """Makes a writer's rows visible, and returns their generations.

        Raises:
            WrongStateError: As in :meth:`Ring.commit`.
        """
        generations = self.ring.commit(reservation)
        self._live.add(reservation.rows)
        self._enter(reservation.rows)
        return generations

    def count_claimable(self, num_rows: int, *, num_promised: int = 0) -> int:
        """Like :meth:`Ring.count_claimable`; 0 unless new rows only have to be the next ones."""
        if self.is_closed or self._is_reserving or not self.settings.is_plain_ring:
            return num_promised
        return self.ring.count_claimable(min(num_rows, self.ring.capacity // 2), num_promised=num_promised)

    # ------------------------------------------------------------ reading

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
            conditions: Those of the sample.
            owner: The session that gets the rows on lease; None: no lease, they stay available to others.
            max_drawn: Most rows that are drawn now, but for units such as a slice, see ``draw_more``; 0: all.
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
        for argument, value in (("num_rows", num_rows), ("num_batches", num_batches)):
            if value < 1:
                raise InvalidRequestError(argument=argument, reason=f"{value} is not at least 1")
        total = num_rows * num_batches
        if owner is not None:
            self._check_lease(conditions, min_rows or num_rows)
        counts, limiter = self.counts, self.settings.limiter
        limiter.check_sample(counts.capacity, min_rows or num_rows)
        if self.is_closed and owner is not None:
            num_rows = total = self._count_what_is_left(conditions, total)
        elif min_rows:
            num_rows = total = self._count_drawable(conditions, total)
            if total < min_rows:
                return None
        elif not replaces and not limiter.can_sample(self._fill_if_closed(counts), total):
            self._check_not_over(conditions, num_rows, num_batches)
            return None
        found = len(self.selectors.get(conditions))
        is_too_few = found < (total if is_apart else 1) or self._waits_for_more(conditions, num_rows, found)
        if not total or is_too_few:
            self._check_not_over(conditions, num_rows, num_batches)
            return None
        sampler = self.settings.sampler
        is_lease, is_grouped = owner is not None, bool(conditions.group)
        terms = SampleTerms(
            conditions,
            lease=None if owner is None else (owner, conditions.consumer, request),
            batch_rows=total if is_lease or (sampler.is_independent and not is_grouped) else num_rows,
            is_alone=is_lease or is_grouped or sampler.is_distinct,
            num_clears=self._num_clears,
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
        self.shared.num_sampled += total * terms.is_counted
        return plan

    def draw_more(self, plan: SamplePlan, max_drawn: int, *, rng: np.random.Generator) -> SamplePlan | None:
        """Draws the next rows of a sample that lacks some.

        Returns ``None``, and changes nothing, if they cannot be drawn any more.

        Rows may come and go in between: each is drawn among those of that moment, and the limiter has let all of them
        through at once. Where they must differ from each other, no other such sample is drawn until the last one is.

        Args:
            plan: The previous part.
            max_drawn: Most rows of the next one, but for units.
            rng: As in ``draw_sample``.
        """
        return self._draw_part(plan.terms, plan.num_missing, max_drawn, rng=rng)

    def _draw_part(
        self, terms: SampleTerms, num_missing: int, max_drawn: int, *, rng: np.random.Generator
    ) -> SamplePlan | None:
        num_rows, num_batches, num_drawn = self._choose_next_part(terms, num_missing, max_drawn)
        selector, lease = self.selectors.get(terms.conditions), terms.lease
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
            self._uncount(terms, num_rows * num_batches - len(rows))
        if len(draw.spent):
            self._live.remove(draw.spent)  # on their way out: they must not change any more
        if lease is not None:
            owner, consumer, request = lease
            self.selectors.lease(owner, consumer, rows, request=request)
        if terms.is_alone:
            self._is_drawing = num_missing > 0
        plan = SamplePlan(
            rows,
            self._generations[rows],
            draw.drawn.columns,
            draw.spent,
            self._generations[draw.spent],
            terms=terms,
            num_missing=num_missing,
            sequence=self.columns.sequence[rows],
        )
        if len(plan.spent):
            self._under_way.add(plan)
        return plan

    def finish(self, plan: SamplePlan) -> bool:
        """Ends a sample, or a part of one, that was sent; returns whether rows have left the table for it."""
        if not len(plan.spent):
            return False
        self._under_way.discard(plan)
        self.remove(plan.spent[self._generations[plan.spent] == plan.spent_generations])
        return True

    def leave_to_draw(self, plan: SamplePlan) -> None:
        """Ends a sample whose rows a kept draw has from now on; those that it spent leave with that."""
        self._under_way.discard(plan)

    def undo(self, plan: SamplePlan) -> None:
        """Undoes a sample that could not be sent: what it used up is available again."""
        for _ in self.undo_in_parts([plan]):
            pass

    def undo_in_parts(self, plans: Sequence[SamplePlan]) -> Iterator[None]:
        """Like :meth:`undo`, of the parts of one sample, one at a time; between two parts rows may come and go."""
        last, terms = plans[-1], plans[-1].terms
        self._uncount(terms, sum(len(plan.rows) for plan in plans) + last.num_missing)
        for plan in plans:
            self._under_way.discard(plan)
            back = plan.spent[self._generations[plan.spent] == plan.spent_generations]
            self._live.add(back)
            self._drawing.undo(plan.rows[self.columns.sequence[plan.rows] == plan.sequence], back)
            self._renew_evictable(back)
            if terms.lease is not None:
                owner, consumer, request = terms.lease
                is_held = self.selectors.leases.find_held(owner, plan.rows, consumer, request=request)
                self.selectors.give_back(owner, consumer, plan.rows[is_held])
            if plan is not last:
                yield
        if terms.is_alone and last.num_missing:
            self._is_drawing = False

    def _uncount(self, terms: SampleTerms, num_rows: int) -> None:
        num_rows *= terms.is_counted
        self.shared.num_sampled -= num_rows
        if terms.num_clears != self._num_clears:  # samples before the last clear are not counted any more
            inserts, samples = self._cleared
            self._cleared = (inserts, samples - num_rows)

    def plan_read(self, rows: Rows) -> RowsPlan:
        """Plans a read of live rows by number, which does not count as a sample.

        Args:
            rows: Row numbers, as ``extend`` returned them; negative ones do not count from the end.

        Raises:
            SelectionError: A row is out of range, or not live: never written, or being overwritten.
        """
        self.check_live(rows)
        return self.plan_rows(rows, {})

    def plan_rows(self, rows: Rows, columns: Mapping[str, NDArray[Any]]) -> RowsPlan:
        """Plans a read of rows as they are, with these columns; also of rows that are on their way out."""
        return RowsPlan(rows, self._generations[rows], columns)

    # ------------------------------------------------------------ changes

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
        if skips_gone and generations is None:
            is_same = self._live.contains(rows)
        elif generations is None:
            self.check_update(rows, priorities, generations)
            is_same = np.ones(len(rows), np.bool_)
        else:
            self.check_update(rows, priorities, generations)
            is_same = self._is_same(rows, generations) & self._live.contains(rows)
        self._set_priorities(rows[is_same], priorities[is_same])
        return int(np.count_nonzero(~is_same))

    def check_update(self, rows: Rows, priorities: NDArray[Any], generations: NDArray[np.uint32] | None) -> None:
        """Raises as ``update_priority`` does, and changes nothing."""
        self.settings.check_uses_priority(self.name)
        check_priorities(priorities)
        if generations is None:
            self.check_live(rows)
        else:
            self.check_numbers(rows)

    def get_priorities(self, rows: Rows) -> NDArray[np.float64]:
        """Returns the priorities of rows. Raises as ``update_priority`` does."""
        self.check_update(rows, np.zeros(0), None)
        self.check_live(rows)
        return self.columns.priority[rows]

    def get_sequences(self, rows: Rows) -> Rows:
        """Returns the sequences of rows, see :mod:`tdserve.rules.replay.row_indexes.row_order`: even where a row still
        continues the row before it. Of rows that are not live they are not defined.

        Raises:
            SelectionError: A row is out of range.
        """
        self.check_numbers(rows)
        return self.columns.sequence[rows] | ~self.order.find_continuing(rows)

    def _set_priorities(self, rows: Rows, priorities: NDArray[np.float64]) -> None:
        if not len(rows):
            return
        self.columns.priority[rows] = priorities
        self._highest = max(self._highest, float(priorities.max()))
        rows = sort_unique(rows)
        self.selectors.update(rows)
        if self._evictor is not None:
            self._evictor.update(rows)

    def _choose_next_part(self, terms: SampleTerms, num_missing: int, max_drawn: int) -> tuple[int, int, int]:
        """Returns the rows of the next part of a batch, how many batches are drawn together, and how many rows of the
        batch were drawn before."""
        batch_rows, num_drawn = terms.batch_rows, -num_missing % terms.batch_rows
        if not num_drawn and batch_rows <= max_drawn:
            return batch_rows, min(max_drawn, num_missing) // batch_rows, 0
        unit = terms.conditions.group_size or self.settings.sampler.compute_unit(terms.num_total, self.ring.capacity)
        return min(max(max_drawn // unit, 1) * unit, batch_rows - num_drawn), 1, num_drawn

    def check_consumer(self, consumer: str, *, is_lease: bool) -> None:
        """Raises InvalidRequestError if the table's consumers were named when it was created, and this is another
        one."""
        consumers = self.settings.consumers
        if consumers and consumer not in consumers and (is_lease or consumer != OWN):
            names = ", ".join(map(repr, consumers))
            reason = f"rows of table {self.name!r} leave it once {names} have had them; {consumer!r} is none of these"
            raise InvalidRequestError(argument="consumer", reason=reason)

    def _check_lease(self, conditions: SampleConditions, num_rows: int) -> None:
        check_distinct(num_rows, self.ring.capacity)
        reason = ""
        if self.columns.trajectories is not None and not conditions.group:
            reason = f"table {self.name!r} samples slices, whose rows belong together"
        elif self.settings.max_times_sampled:
            reason = (
                f"rows of table {self.name!r} leave it by max_times_sampled, not when they are acknowledged; sample"
                " without a consumer, or create the table with consumers= instead of max_times_sampled"
            )
        if reason:
            raise InvalidRequestError(argument="consumer", reason=reason)

    def _waits_for_more(self, conditions: SampleConditions, num_rows: int, num_members: int) -> bool:
        """Returns whether the sampler would refuse that many rows although more may come: rows that are young enough,
        or that are being written. Of a closed table the end is told from that."""
        if not self.settings.sampler.keeps_epoch or conditions.group:
            return False
        if self.is_closed:
            return num_members < num_rows
        most = num_members + self.ring.num_held if conditions.max_lag is None else self.ring.capacity
        return num_members < num_rows <= most

    def _fill_if_closed(self, counts: LimiterCounts) -> LimiterCounts:
        """Returns the counts for which a limiter decides about a sample: for more rows than a closed table has, no
        sample waits."""
        return replace(counts, num_rows=counts.capacity) if self.is_closed else counts

    def _check_not_over(self, conditions: SampleConditions, num_rows: int, num_batches: int) -> None:
        """Raises EndOfStreamError if what a batch waits for cannot come any more. Of several, one may be drawn yet."""
        if num_batches == 1 and self.is_final(conditions):
            num_left = self.selectors.get(conditions).num_drawable
            num_needed = num_rows if num_rows > num_left else 0  # otherwise it is the limiter that keeps them
            raise EndOfStreamError(name=self.name, num_left=num_left, num_needed=num_needed)

    def _count_what_is_left(self, conditions: SampleConditions, num_rows: int) -> int:
        num_left = self.selectors.get(conditions).num_drawable
        if not num_left and self.is_final(conditions):
            raise EndOfStreamError(name=self.name)
        return min(num_rows, num_left)

    def _count_drawable(self, conditions: SampleConditions, most: int) -> int:
        """Returns how many rows can be drawn now, at most this many: of groups, whole ones."""
        counts, limiter, unit = self.counts, self.settings.limiter, conditions.group_size or 1
        units = range(1, min(most, self.selectors.get(conditions).num_drawable) // unit + 1)
        return unit * bisect_left(units, True, key=lambda number: not limiter.can_sample(counts, number * unit))

    # ------------------------------------------------------------ figures

    def is_final(self, conditions: SampleConditions) -> bool:
        """Returns whether the table is closed, and a sample finds no other rows later than it does now: none is being
        written, lacks only leaves or a priority, is on lease to the same consumer, or was spent by a sample that may
        still be undone."""
        if not self.is_closed or self.ring.num_held or self.ring.num_reserved or self.num_coming or self._under_way:
            return False
        is_any_leased = self.selectors.leases.count_leased(conditions.consumer)
        is_any_barred = bool(self.selectors.get(conditions).explain_none())
        return not (is_any_leased or is_any_barred or self.selectors.may_complete(conditions))

    def count_draws(self, conditions: SampleConditions) -> int:
        """Returns how often rows can be drawn, all together, until they leave the table by ``max_times_sampled``."""
        rows = self.selectors.find_members(conditions)
        return int((self.settings.max_times_sampled - self.columns.times_sampled[rows]).sum())

    def explain_sample(self, num_rows: int, conditions: SampleConditions = PLAIN, *, names: Sequence[str] = ()) -> str:
        """Returns what a sample waits for now, for the error when it has waited too long.

        Args:
            names: Names of the leaves of a row, by their numbers; with () the error names no missing leaf.
        """
        counts = self.counts
        if not self.settings.limiter.can_sample(counts, num_rows):
            return self.settings.limiter.explain_sample(counts, self.name, num_rows)
        missing = self.selectors.describe_missing(conditions, names) if names else ""
        reason = self.selectors.get(conditions).explain_none() or conditions.describe(
            has_partial_rows=self.selectors.has_partial_rows, missing=missing
        )
        leased = f"{num_leased} are on lease" if (num_leased := self.selectors.leases.num_leased) else ""
        held = ", ".join(filter(None, (leased, self.describe_kept(conditions.consumer))))
        shown = f" ({held})" if held else ""
        return f"a sample of {num_rows} rows of table {self.name!r}, of whose {counts.num_rows} rows {reason}{shown},"

    def explain_extend(self, num_rows: int) -> str:
        """Returns what a writer waits for now, for the error when it has waited too long."""
        counts = self.counts
        if not self.settings.limiter.can_insert(counts, num_rows):
            waiting = [f"{consumer!r} has not had {n} rows" for consumer, n in self.selectors.count_backlog().items()]
            reason = self.settings.limiter.explain_insert(counts, self.name, num_rows)
            return f"{reason} ({', '.join(waiting)})" if waiting else reason
        kept = f", {len(self.ring.pins)} are kept for the ranks of a step" if self.ring.pins else ""
        return f"room for {num_rows} rows in {self.name!r} ({counts.reserved} are being written{kept})"
