"""Draws rows from the shards of a table as from one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    EndOfStreamError,
    InvalidRequestError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.client.cluster.tables.drawn_parts import DrawnPart, weigh_parts
from tdserve.client.cluster.tables.shard_masses import ask_mass
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.session.calls.call_conditions import is_passing, may_repeat
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampled import Sampled
from tdserve.client.tables.draws.sampling import draw_whole_rows
from tdserve.client.tables.draws.taking import (
    Lease,
    compute_give_back_s,
    give_back,
    give_back_later,
    name_rows,
    take_sampled,
)
from tdserve.rules.lost_servers import PATIENCE_S
from tdserve.rules.replay.samplers.selector import check_distinct
from tdserve.rules.shard_division import (
    KnownMasses,
    ShardMass,
    check_not_final,
    divide_sample,
    explain_shortage,
    is_table_final,
)

MIN_PAUSE_S, MAX_PAUSE_S = 0.002, 0.05
"""Pauses of a call that waits for rows of any shard."""

COMPLETE_WITHIN_S = 0.2
"""Time in which a call that holds some of its rows gets the others, or gives all of them back."""


class ShardDraws:
    """Draws of one handle. Threads: safe.

    Args:
        table: The table.
    """

    def __init__(self, table: ShardedTable) -> None:
        self._table = table
        self._rng = np.random.default_rng()
        self._known = KnownMasses()

    def forget_masses(self) -> None:
        """Asks for all masses again: this client has changed the table."""
        self._known.forget()

    def draw(
        self, make_query: Callable[[Any], Query], num_rows: int, deadline: Deadline, *, takes_fewer: bool = False
    ) -> list[DrawnPart]:
        """Draws rows; those on lease are taken from all shards, or from none.

        Args:
            make_query: Makes the query for a part.
            takes_fewer: Whether fewer rows are drawn if all shards are closed, and have no more.

        As many rows as are there suffice, if the query has ``min_rows`` and they are that many. Of closed shards that
        several readers use up, the last sample may have fewer rows.

        Raises:
            DeadlineExceededError: There were not enough rows in time.
            EndOfStreamError: All shards are closed, and too few rows are left.
            InvalidRequestError: It asks for more different rows than the table can hold.
            TransportError: No shard answers.
        """
        with within(deadline):
            return self._draw(make_query, num_rows, deadline, takes_fewer=takes_fewer)

    def _draw(
        self, make_query: Callable[[Any], Query], num_rows: int, deadline: Deadline, *, takes_fewer: bool
    ) -> list[DrawnPart]:
        if self._table.settings.sampler.uses_trajectories:
            make_query = _name_whole(make_query, num_rows)
        query = self._table.ask_any_part(make_query, deadline)
        if query.is_lease or self._table.settings.sampler.is_distinct:
            check_distinct(query.min_rows or num_rows, self._table.capacity)
        unit = self._find_unit(query)
        if num_rows % unit:
            reason = f"{num_rows} rows are no whole number of groups of {unit}"
            raise InvalidRequestError(argument="num_rows", reason=reason)
        pause_s, seen = MIN_PAUSE_S, dict[int, ShardMass]()
        while True:
            parts = self._try_draw(make_query, query, num_rows, deadline, seen, takes_fewer=takes_fewer)
            if parts is not None:
                return parts
            if deadline.expired:
                table, conditions = self._table, query.describe_conditions()
                why = explain_shortage(table.settings, seen, conditions, servers=table.placement.servers)
                what = f"{query.min_rows or num_rows} rows of all shards of {self._table.name!r} together ({why})"
                raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            time.sleep(deadline.limit(pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _try_draw(
        self,
        make_query: Callable[[Any], Query],
        query: Query,
        num_rows: int,
        deadline: Deadline,
        seen: dict[int, ShardMass],
        *,
        takes_fewer: bool,
    ) -> list[DrawnPart] | None:
        """Draws rows; None if there are not enough now. ``seen`` gets what the shards have said."""
        drawn: list[DrawnPart] = []
        limits: dict[int, int] = {}
        num_missing, began_s = num_rows, time.monotonic()
        try:
            while num_missing > 0:
                masses = self._get_masses(make_query, query, num_rows, deadline, is_fresh=bool(drawn))
                seen.update(masses)
                counts = self._divide(query, masses, num_missing, limits)
                if counts is None and takes_fewer and self._is_closed():
                    counts = self._divide(query, masses, num_missing, {}, is_closed=True)
                    if counts is None and drawn:
                        return drawn
                    num_missing = sum((counts or {}).values()) or num_missing
                if counts is None and drawn and self._uses_up and self._is_short_for_good(query, masses, num_missing):
                    return drawn  # others were faster, and no caller would get these rows any more
                if counts is None and not drawn:
                    table, num_needed = self._table, 0 if query.is_lease else num_missing  # of a lease, any rows
                    check_not_final(table.name, masses, table.num_shards, num_needed=num_needed)
                more = [] if counts is None else self._draw_parts(make_query, counts, deadline, limits, drawn)
                if not more:
                    if not drawn or self._must_give_back(query, drawn, time.monotonic() - began_s, deadline):
                        self.give_back(drawn, deadline)
                        return None
                    time.sleep(MIN_PAUSE_S)
                    if counts is None:
                        limits.clear()  # rows may have come
                    continue
                scales = {shard: found.scale for shard, found in masses.items()}
                weigh_parts(more, scales, self._table.settings.sampler)
                got = sum(len(part.rows.tensors["index",]) for part in more)
                num_missing = num_missing - got if self._table.settings.sampler.is_exact else 0
                if 0 < query.min_rows <= num_rows - num_missing:
                    break
            return drawn
        except BaseException:
            self.give_back(drawn, deadline)
            raise

    def _is_short_for_good(self, query: Query, masses: Mapping[int, ShardMass], num_missing: int) -> bool:
        """Returns whether the shards do not have this many rows, and none can come."""
        is_final = is_table_final(masses, self._table.num_shards)
        return is_final and self._divide(query, masses, num_missing, {}) is None

    def _must_give_back(self, query: Query, drawn: list[DrawnPart], held_s: float, deadline: Deadline) -> bool:
        """Returns whether a call that holds some of its rows gives them back.

        Raises:
            DeadlineExceededError: Its time is over, and they are used up: no other call gets them.
        """
        if query.is_lease or not self._uses_up:
            return held_s > COMPLETE_WITHIN_S or deadline.expired
        if deadline.expired:
            num_drawn = sum(part.rows.spec.batch_size[0] for part in drawn)
            what = f"a whole sample of {self._table.name!r}, of which {num_drawn} rows were drawn and are used up"
            raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
        return False

    @property
    def _uses_up(self) -> bool:
        """Whether rows leave the table when they were drawn often enough: then others may have drawn them just now."""
        return self._table.settings.max_times_sampled > 0

    def give_back(self, drawn: list[DrawnPart], deadline: Deadline, names: Sequence[Lease] | None = None) -> None:
        """Gives rows on lease back, so that the list is empty; those of a server that does not answer in another
        thread.

        Args:
            deadline: Deadline of the call of which this is a step; see ``compute_give_back_s``.
            names: What identifies the rows of each part, if they were joined since; None: the rows themselves.
        """
        within_s = compute_give_back_s(deadline)
        until = Deadline.after(within_s)
        for part, named in zip(drawn, names or [name_rows(part.rows) for part in drawn], strict=True):
            if not part.query.is_lease:
                continue
            if until.expired or self._table.parts.is_away(part.shard):
                give_back_later(part.client, part.query, named)
            else:
                give_back(part.client, part.query, named, until.limit(within_s))
        drawn.clear()

    # ------------------------------------------------------------ masses

    def _get_masses(
        self,
        make_query: Callable[[Any], Query],
        query: Query,
        num_rows: int,
        deadline: Deadline,
        *,
        is_fresh: bool,
    ) -> Mapping[int, ShardMass]:
        table = self._table
        live = table.parts.list_live()
        name = (
            query.require,
            query.consumer,
            query.group_by,
            query.group_size,
            query.max_lag,
            query.is_lease,
            num_rows,
        )
        must_ask = is_fresh or query.is_lease or self._uses_up or table.settings.sampler.keeps_epoch
        known = None if must_ask else self._known.find(name, live, time.monotonic())
        if known is None:
            known = self._ask_masses(make_query, num_rows, deadline)
            if not set(live) <= set(known):  # the others had answered long before a server turned out to be lost
                known = self._ask_masses(make_query, num_rows, deadline)
            self._known.note(name, known, time.monotonic())
        return known

    def _ask_masses(
        self, make_query: Callable[[Any], Query], num_rows: int, deadline: Deadline
    ) -> Mapping[int, ShardMass]:
        """Asks all shards; one that has stopped answering must not take all the time that the call has."""

        def ask(_: int, part: Any) -> ShardMass:
            return ask_mass(part, make_query, num_rows, deadline.shorten(PATIENCE_S))

        while True:
            try:
                return self._table.ask_parts(range(self._table.num_shards), ask, deadline=deadline)
            except TDServeError as error:  # a server is slow, or the table at rest
                if not may_repeat(error, deadline):
                    raise

    def _find_unit(self, query: Query) -> int:
        """Returns the rows that are drawn together: of a group, or a slice.

        Raises:
            InvalidRequestError: The sample is no whole number of slices, or one is longer than a shard.
        """
        if not query.whole_rows:
            return query.group_size or 1
        return self._table.settings.sampler.compute_unit(query.whole_rows, self._table.part_capacity)

    def _divide(
        self,
        query: Query,
        masses: Mapping[int, ShardMass],
        num_missing: int,
        limits: Mapping[int, int],
        *,
        is_closed: bool = False,
    ) -> dict[int, int] | None:
        """Divides rows among the shards; None if they do not have enough: with ``min_rows``, or on lease from closed
        shards, if they have none."""
        return divide_sample(
            self._table.settings,
            masses,
            num_missing,
            self._rng,
            unit=self._find_unit(query),
            limits=limits,
            is_lease=query.is_lease,
            is_grouped=query.group_by is not None,
            takes_fewer=query.min_rows > 0 or is_closed,
            is_closed=is_closed,
        )

    def _is_closed(self) -> bool:
        return self._table.describe().is_closed and not self._table.is_degraded

    # ------------------------------------------------------------ parts

    def _draw_parts(
        self,
        make_query: Callable[[Any], Query],
        counts: Mapping[int, int],
        deadline: Deadline,
        limits: dict[int, int],
        drawn: list[DrawnPart],
    ) -> list[DrawnPart]:
        """Draws this many rows from each shard; those that did not answer, or have fewer by now, give none.

        Args:
            limits: Gets what a shard that has fewer rows is asked for next.
            drawn: Gets what is drawn, also if another shard then refuses.
        """
        more: list[DrawnPart] = []

        def is_asked_once(query: Query) -> bool:
            """Returns whether a shard is not waited for: others may have what it lacks."""
            return query.is_lease or self._uses_up

        def draw(shard: int, part: Any) -> DrawnPart:
            query, client = make_query(part), part._client
            if query.is_lease:
                query = replace(query, min_rows=min(query.min_rows, 1))  # the others may have the rest
                rows = take_sampled(client, query, counts[shard], Deadline.after(0))
            else:
                given = Deadline.after(0) if is_asked_once(query) else deadline
                rows = draw_whole_rows(client, query, counts[shard], num_batches=1, deadline=given)
            return DrawnPart(shard, client, query, rows)

        def follow_and_draw(shard: int, part: Any) -> None:
            try:
                more.append(part.follow_and_retry(lambda: draw(shard, part), deadline))
            except TransferAbortedError:  # rows were written meanwhile; the next try finds them whole
                return
            except TransportError:  # perhaps the server is away
                raise
            except TDServeError as error:
                query = make_query(part)
                is_short = isinstance(error, (DeadlineExceededError, EndOfStreamError))
                if not (is_asked_once(query) and (is_short or is_passing(error))):
                    raise
                if is_short:  # others were faster
                    limits[shard] = counts[shard] // self._find_unit(query) // 2

        try:
            self._table.ask_parts(counts, follow_and_draw, deadline=deadline)
        except TransportError as error:  # the servers of these shards are away; others may have the rows
            if not error.retryable or deadline.expired:
                raise
            self._known.forget()
        finally:
            drawn += more
        return more

    def join(self, drawn: list[DrawnPart]) -> Sampled:
        """Joins the rows of all shards, with the numbers that they have in the whole table; rows, groups and slices are
        in random order. The parts stay as they are."""
        unit, sampler = self._find_unit(drawn[0].query), self._table.settings.sampler
        rows = [part.rows.move_rows(part.shard * self._table.part_capacity) for part in drawn]
        num_units = sum(part.rows.spec.batch_size[0] for part in drawn) // unit
        order = None
        is_ordered = sampler.is_ordered or drawn[0].query.share is not None
        if len(drawn) > 1 and not is_ordered and (unit == 1 or sampler.is_exact):
            firsts = torch.from_numpy(self._rng.permutation(num_units)) * unit
            order = (firsts[:, None] + torch.arange(unit)).flatten()
        return Sampled.join(rows, order)


def _name_whole(make_query: Callable[[Any], Query], num_rows: int) -> Callable[[Any], Query]:
    """Makes queries of slices name the rows of the whole sample."""

    def make(part: Any) -> Query:
        query = make_query(part)
        return query if query.group_by is not None else replace(query, whole_rows=num_rows)

    return make
