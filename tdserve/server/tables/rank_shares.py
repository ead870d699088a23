"""Shares of data-parallel readers: one draw for all ranks of a step is kept and recorded, and each reads its part."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.draws.kept_draw import MAX_RUN_BYTES, DrawTerms, KeptDraw
from tdserve.rules.replay.eligibility.conditions import SampleConditions
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.replay.rank_draws import RankDraw, plan_share
from tdserve.rules.replay.sample_ages import note_sample
from tdserve.server.catalog.stores import Stores
from tdserve.server.mutations.row_write_hold import wait_for_others
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.draw_records import renew_draws, save_draw
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.tables.discarding import Discarding
from tdserve.server.tables.rule_keys import RuleKeys
from tdserve.server.tables.selector_building import SelectorBuilding
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2

MAX_RANKS = 1 << 16


@dataclass(eq=False)
class _Drawing:
    """A draw that a rank waits for."""

    shares: RankShares
    store: OpenedStore
    step: int
    terms: DrawTerms

    def draw(self) -> KeptDraw | None:
        """Returns the draw of the step, which another rank may have caused meanwhile; None to wait."""
        table = self.store.get_table()
        found = table.draws.find(self.step, self.terms)
        if found is not None:
            return found
        return self.shares.draw(self.store, self.step, self.terms)

    def describe_wait(self) -> str:
        """Returns what it waits for."""
        table, terms = self.store.get_table(), self.terms
        return table.samples.explain_sample(terms.num_drawn, terms.conditions, names=self.store.leaf_names)


class RankShares:
    """Finds what a rank gets of a step.

    Args:
        stores: All stores of the server.
        rule_keys: Reads the sizes of rows.
        discarding: Discards rows that are too old first.
        selector_building: Builds selectors of large tables.
    """

    def __init__(
        self, stores: Stores, *, rule_keys: RuleKeys, discarding: Discarding, selector_building: SelectorBuilding
    ) -> None:
        self._stores = stores
        self._rule_keys = rule_keys
        self._discarding = discarding
        self._selector_building = selector_building
        self._rng = np.random.default_rng()
        self._dealing = asyncio.Lock()

    async def plan(
        self,
        session: ClientSession,
        store: OpenedStore,
        asked: control_pb2.SampleRequest,
        conditions: SampleConditions,
        deadline: Deadline,
    ) -> RowsPlan:
        """Returns the rows of a rank. The first rank that asks for a step draws for all of them.

        Raises:
            InvalidRequestError: Other ranks of the step have asked on other terms, or no such draw is possible.
            StepForgottenError: The draw is not kept any more.
            WrongStateError: Some of the rows were deleted.
            DeadlineExceededError: There were not enough rows in time.
        """
        share, table = asked.share, store.get_table()
        terms = _make_terms(store, asked, conditions)
        if table.draws.note_asked(share.rank, share.step, share.world_size, share.run):
            store.waiters.wake()  # a writer may need the rows of steps that are over
        draw = table.draws.find(share.step, terms)
        if draw is None:
            await self._discarding.finish(session, store, conditions.max_lag, conditions)
            await self._selector_building.wait_ready(session, store, conditions, terms.num_drawn, deadline)
            drawing = _Drawing(self, store, share.step, terms)
            line = ("share", terms, share.step)  # a draw that is there already is kept from no rank by another step
            draw = await session.wait(store.waiters, drawing.draw, deadline, drawing.describe_wait, line=line)
        if draw.shares is None:
            await self._deal(session, store, draw)
        rows = RowSet.from_rows(draw.rows)
        while store.writes and any(rows.has_overlap(others) for others in store.writes):
            store.lost.check(rows, store=store.name, remedy="continue with the next step")
            await wait_for_others(session, store, rows, deadline)
        return plan_share(store.get_table(), draw, share.rank)

    def draw(self, store: OpenedStore, step: int, terms: DrawTerms) -> KeptDraw | None:
        """Draws for all ranks, and records the draw in the same turn; None if that must wait."""
        conditions, table = terms.conditions, store.get_table()
        if not self._discarding.refresh(store, conditions.max_lag, conditions):
            return None
        if not self._selector_building.refresh(store, conditions, terms.num_drawn):
            return None
        made = RankDraw.make(table, step, terms, rng=self._rng)
        if made is None:
            return None
        if not terms.balance:
            made.draw.deal()
        try:
            self._record(store, made.draw)
        except BaseException:
            made.undo()
            raise
        made.settle()
        note_sample(table.state, made.plan, time.monotonic())
        store.waiters.wake()  # a writer may wait for what it used up, and other ranks for it
        return made.draw

    async def _deal(self, session: ClientSession, store: OpenedStore, draw: KeptDraw) -> None:
        """Deals a draw by the sizes of its rows, for the first rank that gets so far."""
        async with self._dealing:
            if draw.shares is None:
                paths = _find_measured(store, draw.terms.balance)
                sizes = [await self._rule_keys.measure(store, path, draw.rows, session) for path in paths]
                draw.deal(np.sum(sizes, axis=0))
                try:
                    store.check_present()
                    self._record(store, draw)
                except BaseException:
                    draw.shares = None  # a restart would deal otherwise: row sizes may have changed
                    raise

    def _record(self, store: OpenedStore, draw: KeptDraw) -> None:
        uid, table = store.record.uid, store.get_table()
        with self._stores.db.begin_transaction() as txn:
            renew_draws(uid, table, txn)
            save_draw(uid, draw, txn)
            self._stores.save_state(store, txn, store.get_table_state())


def _make_terms(store: OpenedStore, asked: control_pb2.SampleRequest, conditions: SampleConditions) -> DrawTerms:
    """Returns the terms of a request.

    Raises:
        InvalidRequestError: A number is out of range, or the request is for a lease.
        KeyNotFoundError: Rows have no such leaf to balance by.
    """
    share = asked.share
    if not 1 <= share.world_size <= MAX_RANKS:
        raise InvalidRequestError(argument="world_size", reason=f"{share.world_size} is not from 1 to {MAX_RANKS}")
    if share.rank >= share.world_size:
        raise InvalidRequestError(
            argument="rank", reason=f"{share.rank} is not below {share.world_size}, the world_size"
        )
    if len(share.run.encode()) > MAX_RUN_BYTES:
        raise InvalidRequestError(argument="run", reason=f"it has more than {MAX_RUN_BYTES} bytes in UTF-8")
    if asked.is_lease:
        raise InvalidRequestError(argument="is_lease", reason="ranks have no leases: a draw is kept for all of them")
    if asked.num_rows < 1 or asked.num_batches > 1:
        raise InvalidRequestError(argument="num_rows", reason="a rank gets at least one row, and one batch at a time")
    balance = tuple(share.balance.parts)
    if balance and not _find_measured(store, balance):
        raise KeyNotFoundError(store=store.name, key=".".join(balance))
    return DrawTerms(asked.num_rows, share.world_size, conditions, balance, share.run)


def _find_measured(store: OpenedStore, balance: Path) -> list[Path]:
    """Returns the leaves whose sizes count: the leaf of this key, or all values below it."""
    if balance in store.spec.tensors_by_path:
        return [balance]
    return [path for path, _ in store.spec.values if path[: len(balance)] == balance]
