"""Sampling: the table draws rows, and the session's mover sends them.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError
from tdserve.base.failpoints import reach
from tdserve.base.ids import check_text
from tdserve.messages.content import MAX_SAMPLE_ROWS, make_rows_layout
from tdserve.messages.row_numbers import TREE_PIECE_ROWS, decode_rows
from tdserve.rules.replay.eligibility.conditions import PLAIN, SampleConditions
from tdserve.rules.replay.plans import RowsPlan, SamplePlan
from tdserve.rules.replay.sample_ages import note_sample
from tdserve.rules.replay.table import Table
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.turns import run_in_turns
from tdserve.server.kinds.policies import refresh_staleness
from tdserve.server.open_store.counts import make_counts
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import get_message
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.mover import RowsToSend
from tdserve.server.sessions.session_ends import check_open
from tdserve.server.tables.discarding import Discarding
from tdserve.server.tables.lease_timer import LeaseTimer, check_lease_s
from tdserve.server.tables.policy_versions import adopt_reported_policy, check_max_lag
from tdserve.server.tables.rank_shares import RankShares
from tdserve.server.tables.rule_keys import RuleKeys
from tdserve.server.tables.selector_building import SelectorBuilding
from tdserve.v1 import content_pb2, control_pb2

MAX_LOOKED_AT = 1024
"""Most rows in which missing leaves are counted for a client that asks again and again: some 30 microseconds."""

MAX_ASKED_ROWS = 1 << 17
"""Most rows whose priorities are in one answer, of a megabyte; or of which it has anything else."""


class _DrawnSample(NamedTuple):
    """The rows to send, and the parts in which the sample is finished or undone."""

    plan: SamplePlan
    parts: Sequence[SamplePlan]


@dataclass(eq=False)
class _SampleCall:
    """A request for a sample, until its rows are drawn.

    Attributes:
        conditions: Which rows it may draw.
        max_lag: Largest lag of the rows; see :class:`Discarding` for what becomes of those above it.
        draws_at_once: Whether all rows are drawn in one turn. Set after a draw over several turns failed because rows
            left the table meanwhile.
    """

    session: ClientSession
    request: int
    store: OpenedStore
    asked: control_pb2.SampleRequest
    conditions: SampleConditions
    max_lag: int | None
    deadline: Deadline
    discarding: Discarding
    selector_building: SelectorBuilding
    rng: np.random.Generator
    draws_at_once: bool = False

    def __post_init__(self) -> None:
        self.num_rows, self.num_batches = _get_size(self.asked)
        self.whole_rows = _find_whole_rows(self.asked, self.store.get_table())

    @property
    def line(self) -> Hashable:
        """Name of its line: calls with an equal one wait in turn, for if the first cannot be served, none can."""
        asked = self.asked
        wanted = (self.num_rows, self.whole_rows, self.num_batches, self.conditions, self.max_lag)
        return ("sample", *wanted, asked.min_rows, asked.is_lease, asked.replaces_torn)

    @property
    def part_rows(self) -> int:
        """Returns how many rows are drawn in one turn: fewer for a named consumer, to which each new row may cost a
        page of memory."""
        return TREE_PIECE_ROWS // 2 if self.conditions.consumer else TREE_PIECE_ROWS

    async def make_ready(self) -> None:
        """Waits until there is a selector for it. Errors as in ``SelectorBuilding.wait_ready``."""
        session, store, num_rows = self.session, self.store, self.whole_rows
        await self.selector_building.wait_ready(session, store, self.conditions, num_rows, self.deadline)

    def draw(self) -> SamplePlan | None:
        """Draws all batches, or only the first if the limiter may never admit several. Returns None if the call must
        wait."""
        return self.draw_batches(self.num_batches) or (self.draw_batches(1) if self.num_batches > 1 else None)

    def draw_batches(self, num_batches: int) -> SamplePlan | None:
        """Draws the first rows of some batches. Returns None if the call must wait."""
        if not self.discarding.refresh(self.store, self.max_lag, self.conditions):
            return None
        if not self.selector_building.refresh(self.store, self.conditions, self.whole_rows):
            return None
        return self.store.get_table().samples.draw_sample(
            self.num_rows,
            num_batches,
            rng=self.rng,
            conditions=self.conditions,
            owner=self.session.number if self.asked.is_lease else None,
            max_drawn=0 if self.draws_at_once else self.part_rows,
            request=self.request,
            replaces=self.asked.replaces_torn,
            whole_rows=self.asked.whole_rows,
            min_rows=self.asked.min_rows,
        )

    def describe_wait(self) -> str:
        """Returns what it waits for."""
        return self.store.get_table().samples.explain_sample(
            self.asked.min_rows or self.num_rows, self.conditions, names=self.store.leaf_names
        )


class Samples:
    """Serves the readers of replay tables.

    Args:
        stores: All stores of the server.
        rule_keys: Groups rows by a leaf.
        lease_timer: Ends leases that last for a limited time.
    """

    def __init__(self, stores: Stores, *, rule_keys: RuleKeys, lease_timer: LeaseTimer) -> None:
        self._stores = stores
        self._rule_keys, self._lease_timer = rule_keys, lease_timer
        self._selector_building = SelectorBuilding()
        self._discarding = Discarding(stores)
        self._rank_shares = RankShares(
            stores, rule_keys=rule_keys, discarding=self._discarding, selector_building=self._selector_building
        )
        self._rng = np.random.default_rng()
        self._settling: set[asyncio.Task[None]] = set()
        self._leasing: dict[int, set[str]] = {}  # by session: incarnations of the tables that it has leases of

    async def sample(
        self, session: ClientSession, request: int, asked: control_pb2.SampleRequest
    ) -> control_pb2.Done | None:
        """Draws rows and has them sent. Returns None if Accepted was sent and the content follows over the channel.

        Raises:
            StoreNotFoundError: The store was deleted; it is not waited for, since a client that samples has seen it.
            KeyNotFoundError: The table has no such key to require or to group by.
            DeadlineExceededError: No sample was possible in time; the message names what was missing.
            EndOfStreamError: The queue was closed and is drained.
            WrongStateError: The client means another kind of store.
            StepForgottenError: The draw of the share is not kept any more.
        """
        deadline = Deadline.after(asked.timeout_s)
        store = self._stores.get(asked.store)
        store.check_kind(asked.kind)
        table = store.get_table()
        _check_current(store, table, asked)
        store.check_capacity(asked.capacity)
        adopt_reported_policy(self._stores, store, asked)
        if asked.asks_newest or asked.asks_counts or asked.priorities_of or asked.sequences_of:
            return self._answer_without_rows(store, asked)
        max_lag = check_max_lag(store, asked)
        table.samples.check_consumer(asked.consumer, is_lease=asked.is_lease)
        conditions = await self._parse_conditions(session, store, asked)
        if max_lag is not None and not table.settings.is_queue:  # a queue discards rows that are too old
            conditions = conditions._replace(max_lag=max_lag)
        if asked.HasField("share"):
            share = await self._rank_shares.plan(session, store, asked, conditions, deadline)
            return await self.send(session, request, store, share, includes_spec=not asked.fingerprint)
        tools = self._discarding, self._selector_building, self._rng
        call = _SampleCall(session, request, store, asked, conditions, max_lag, deadline, *tools)
        await self._discarding.finish(session, store, max_lag, conditions)
        await call.make_ready()
        if asked.asks_mass:
            return _answer_mass(call)
        check_open(session)
        if asked.is_lease:
            self._leasing.setdefault(session.number, set()).add(store.record.uid)
        return await (self._send_expected(call) if asked.message_nbytes else self._send_awaited(call))

    def _answer_without_rows(self, store: OpenedStore, asked: control_pb2.SampleRequest) -> control_pb2.Done:
        if asked.asks_counts:
            return control_pb2.Done(counts=make_counts(store))
        if asked.priorities_of:
            rows = decode_rows(asked.priorities_of, max_rows=MAX_ASKED_ROWS)
            return control_pb2.Done(priorities=store.get_table().get_priorities(rows).astype("<f8").tobytes())
        if asked.sequences_of:
            rows = decode_rows(asked.sequences_of, max_rows=MAX_ASKED_ROWS)
            return control_pb2.Done(sequences=store.get_table().get_sequences(rows).astype("<i8").tobytes())
        staleness = refresh_staleness(self._stores, store)
        if staleness is None:
            return control_pb2.Done()
        oldest = staleness.compute_floor(asked.max_lag)
        return control_pb2.Done(newest_policy_version=staleness.newest, oldest_policy_version=oldest)

    async def _complete(self, call: _SampleCall, plan: SamplePlan) -> _DrawnSample | None:
        """Draws the missing rows of a plan, a few at a time. If too many rows have left the table meanwhile, undoes the
        plan and returns None."""
        if not plan.num_missing:
            return _DrawnSample(plan, (plan,))
        parts, store, terms = [plan], call.store, plan.terms
        try:
            await inline_tasks.ensure_task()
            while parts[-1].num_missing:
                await asyncio.sleep(0)
                store.check_present()
                check_open(call.session)
                await call.make_ready()
                more = store.get_table().samples.draw_more(parts[-1], call.part_rows, rng=self._rng)
                if more is None:
                    await self._undo(store, parts)
                    return None
                parts.append(more)
            joined = await asyncio.to_thread(SamplePlan.join, parts)
            if terms.is_alone and terms.lease is None and await asyncio.to_thread(joined.has_repeated_rows):
                await self._undo(store, parts)  # a row has left, come back, and been drawn again
                return None
        except BaseException:
            await self._undo(store, parts)
            raise
        return _DrawnSample(joined, parts)

    async def release(self, session: int) -> None:
        """Gives back all rows that an ended session has on lease."""
        for store in self._find_tables(self._leasing.pop(session, set())):
            await run_in_turns(_release_in_pieces(store, session))

    async def give_back(self, session: int, request: int) -> None:
        """Gives back the rows that a session has on lease for one request, if any: the answer has not reached the
        client."""
        for store in self._find_tables(self._leasing.get(session, set())):
            await run_in_turns(_release_in_pieces(store, session, request))

    def _find_tables(self, uids: Iterable[str]) -> list[OpenedStore]:
        """Returns those that still exist: a session may last longer than many tables, and keeps no memory of theirs."""
        names = filter(None, map(self._stores.catalog.find_name, uids))
        return [store for store in map(self._stores.find_if_open, names) if store is not None]

    async def send(
        self,
        session: ClientSession,
        request: int,
        store: OpenedStore,
        plan: RowsPlan,
        *,
        includes_spec: bool,
        keys: Sequence[content_pb2.Path] = (),
    ) -> control_pb2.Done | None:
        """Sends rows, inline or after an Accepted; of each only some keys, if they are given."""
        row_spec = store.get_row_spec()
        accepted = control_pb2.Accepted(num_rows=len(plan.rows), fingerprint=row_spec.fingerprint)
        if includes_spec:
            accepted.spec.CopyFrom(get_message(row_spec))
        return await session.movers.reads.get_rows(request, RowsToSend(store, plan, accepted, keys))

    async def _parse_conditions(
        self, session: ClientSession, store: OpenedStore, asked: control_pb2.SampleRequest
    ) -> SampleConditions:
        if not (asked.require or asked.consumer or asked.accepts_partial or asked.HasField("group_by")):
            return PLAIN
        check_text("consumer", asked.consumer)
        numbers: tuple[int, ...] | None = None
        if asked.require or asked.accepts_partial:
            numbers = tuple(
                sorted({number for key in asked.require for number in store.find_numbers(tuple(key.parts))})
            )
        if not asked.HasField("group_by"):
            return SampleConditions(numbers, asked.consumer)
        if not 1 <= asked.group_size <= store.record.capacity:
            reason = f"{asked.group_size} is not from 1 to the capacity, {store.record.capacity}"
            raise InvalidRequestError(argument="group_size", reason=reason)
        column = await self._rule_keys.learn_group(store, tuple(asked.group_by.parts), session)
        return SampleConditions(numbers, asked.consumer, column, asked.group_size)

    async def _send_expected(self, call: _SampleCall) -> control_pb2.Done | None:
        """Sends the content that the client already waits for; void content if no sample is possible now."""
        session, store, expected = call.session, call.store, call.asked.message_nbytes
        # Callers that wait in line go first.
        begun = None if store.waiters.has_line(call.line) else call.draw_batches(call.num_batches)
        drawn = None if begun is None else await self._complete(call, begun)
        if drawn is None:
            session.send_void(call.request, expected)
            return control_pb2.Done(must_wait=True)
        plan = drawn.plan

        async def send() -> control_pb2.Done | None:
            if store.spec.values or not _is_expected(store, plan, expected):
                raise store.make_older_store_error()
            return await session.movers.reads.get_rows(call.request, RowsToSend(store, plan, None))

        return await self._send_drawn(call, drawn, send)

    async def _send_awaited(self, call: _SampleCall) -> control_pb2.Done | None:
        """Sends a sample as soon as there is one."""
        session, store = call.session, call.store
        drawn: _DrawnSample | None = None
        while drawn is None:
            begun = await session.wait(
                store.waiters,
                call.draw,
                call.deadline,
                call.describe_wait,
                line=call.line,
                give_back=store.get_table().samples.undo,
            )
            drawn = await self._complete(call, begun)
            call.draws_at_once = drawn is None  # rows left during the draw: retry, in one turn
        plan, includes_spec = drawn.plan, not call.asked.fingerprint
        send = partial(self.send, session, call.request, store, plan, includes_spec=includes_spec)
        return await self._send_drawn(call, drawn, send)

    async def _send_drawn(
        self, call: _SampleCall, drawn: _DrawnSample, send: Callable[[], Awaitable[control_pb2.Done | None]]
    ) -> control_pb2.Done | None:
        """Sends a sample. If that fails, what it used up is available again; of rows that come once in each epoch, in
        the next one."""
        store = call.store
        reach("lease.drawn")
        note_sample(store.get_table().state, drawn.plan, time.monotonic())
        if call.asked.lease_s:
            self._lease_timer.limit(store, call.session.number, call.request, call.asked.lease_s)
        store.waiters.wake()  # a writer may wait for what it used up
        try:
            done = await send()
        except BaseException:
            await self._undo(store, drawn.parts)
            raise
        if len(drawn.plan.spent):
            await self._settle(store, map(store.get_table().samples.finish, drawn.parts), is_long=len(drawn.parts) > 1)
        if done is None and call.asked.awaits_done:  # the content that has gone over the channel is all
            return control_pb2.Done()
        return done

    async def _undo(self, store: OpenedStore, parts: Sequence[SamplePlan]) -> None:
        await self._settle(store, store.get_table().samples.undo_in_parts(parts), is_long=len(parts) > 1)

    async def _settle(self, store: OpenedStore, steps: Iterable[object], *, is_long: bool) -> None:
        """Takes all steps that end a sample, even if the caller is cancelled meanwhile."""
        if is_long:
            task = asyncio.create_task(run_in_turns(steps), name="tdserve-settling")
            self._stores.seals.count_task(store.name, task)
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
            task.add_done_callback(lambda _: store.waiters.wake())
            await asyncio.shield(task)
        else:
            for _ in steps:
                pass
            store.waiters.wake()


def _answer_mass(call: _SampleCall) -> control_pb2.Done:
    table, missing, num_draws = call.store.get_table(), "", 0
    selector, is_final = table.selectors.get(call.conditions), table.samples.is_final(call.conditions)
    if selector.num_drawable < call.num_rows:
        lacking = table.selectors.describe_missing(call.conditions, call.store.leaf_names, max_rows=MAX_LOOKED_AT)
        kept = table.samples.describe_kept(call.conditions.consumer, max_rows=MAX_LOOKED_AT)
        missing = ", ".join(filter(None, (lacking, kept)))
        num_draws = table.samples.count_draws(call.conditions) if is_final and table.settings.max_times_sampled else 0
    return control_pb2.Done(
        mass=selector.compute_mass(call.whole_rows),
        least_mass=selector.least_mass,
        num_epochs=selector.num_epochs,
        num_drawable=selector.num_drawable,
        missing=missing,
        num_draws=num_draws,
        is_final=is_final,
        counts=make_counts(call.store),
    )


def _check_current(store: OpenedStore, table: Table, asked: control_pb2.SampleRequest) -> None:
    """Raises StructureChangedError if the client expects other rows, or other columns beside them, than the table
    has."""
    has_others = asked.HasField("added") and asked.added != table.settings.column_bits[asked.HasField("group_by")]
    if has_others or (asked.fingerprint and asked.fingerprint != store.spec.fingerprint):
        raise store.make_older_store_error()


def _get_size(asked: control_pb2.SampleRequest) -> tuple[int, int]:
    """Returns the rows per batch and the number of batches."""
    num_rows, num_batches = asked.num_rows, max(asked.num_batches, 1)
    if num_rows * num_batches > MAX_SAMPLE_ROWS:
        reason = f"{num_rows} rows in {num_batches} batches are more than {MAX_SAMPLE_ROWS}"
        raise InvalidRequestError(argument="num_rows", reason=reason)
    if asked.lease_s:
        check_lease_s(asked.lease_s if asked.is_lease else math.nan)
    if asked.min_rows > num_rows or (asked.min_rows and not asked.is_lease):
        reason = f"{asked.min_rows} of {num_rows} rows: only a lease may have fewer rows than it asks for"
        raise InvalidRequestError(argument="min_rows", reason=reason)
    return num_rows, num_batches


def _find_whole_rows(asked: control_pb2.SampleRequest, table: Table) -> int:
    """Returns the rows of the whole sample.

    Raises:
        InvalidRequestError: The request is for no part of a sample of this many rows, or of a table without slices.
    """
    whole_rows = asked.whole_rows or asked.num_rows
    if asked.whole_rows:
        sampler = table.settings.sampler
        unit = sampler.compute_unit(whole_rows, table.ring.capacity)
        if not sampler.uses_trajectories or asked.HasField("group_by") or asked.num_rows % unit:
            reason = f"{asked.num_rows} of {whole_rows} rows are no whole number of slices of table {table.name!r}"
            raise InvalidRequestError(argument="whole_rows", reason=reason)
    return whole_rows


def _release_in_pieces(store: OpenedStore, session: int, request: int = 0) -> Iterator[None]:
    for num_rows in store.get_table().selectors.release_in_pieces(session, request=request):
        if num_rows:
            store.waiters.wake()
        yield


def _is_expected(store: OpenedStore, plan: SamplePlan, message_nbytes: Sequence[int]) -> bool:
    """Returns whether these rows make exactly the messages that the client waits for."""
    layout = make_rows_layout(store.spec, len(plan.rows), tuple(plan.columns))
    return layout.message_nbytes == tuple(message_nbytes)
