"""Changes of replay tables without content: priorities, deletions, limiters, acknowledgements.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.failpoints import reach
from tdserve.messages.long_lists import read_list
from tdserve.messages.row_numbers import PIECE_ROWS, TREE_PIECE_ROWS, Rows, decode_column, decode_rows, has_runs
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.settings import Settings
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.server.execution.turns import call_in_turns, run_in_turns, sum_in_turns
from tdserve.server.open_store.counts import make_counts
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.departure_records import forget_departure, save_departure
from tdserve.server.recovery.draw_records import renew_draws
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.tables.lease_timer import LeaseTimer, check_lease_s
from tdserve.v1 import control_pb2


class RowChanges:
    """Serves the changes of replay tables that bring no rows.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
        lease_timer: Ends leases that last for a limited time.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers, *, lease_timer: LeaseTimer) -> None:
        self._stores = stores
        self._answers = answers
        self._lease_timer = lease_timer

    async def change(self, session: ClientSession, request: int, asked: control_pb2.ChangeRequest) -> control_pb2.Done:
        """Changes a table, whole or not at all.

        Raises:
            SelectionError, InvalidRequestError, WrongStateError, CapacityError: Nothing was changed.
        """
        store = self._stores.get(asked.store)
        store.check_kind(asked.kind)
        store.get_table()
        store.check_capacity(asked.capacity)
        kind = asked.WhichOneof("change")
        if kind == "priorities":  # it is safe to repeat, so nothing is recorded
            done = await _set_priorities(store, asked.priorities)
            if not asked.priorities.checks_only:
                store.waiters.wake()
            return done
        if kind == "renew":  # so is this, and leases are not on record either
            return await self._renew(session, store, asked.renew)
        async with store.write_lock:  # no row is half written meanwhile
            store.check_present()
            if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                return answered  # a retry: committed over an ended session
            self._stores.db.check_room()
            departure = await _plan_departure(session, store, kind, asked)
            if departure is None:
                num_rows = await _apply(session, store, kind, asked)
            else:
                num_rows = departure.num_rows
            store.waiters.check_not_gone()  # a seal waits: what has been changed is recorded, or a retry would differ
            done = control_pb2.Done(num_rows=num_rows, counts=make_counts(store, departure=departure))
            # One that is not on record must not be carried out: its retry after a crash would be refused.
            is_decided = kind != "acknowledge"
            self._record(session, request, store, departure, done, is_decided=is_decided)
            reach("change.recorded")
            if departure is not None:
                steps = store.get_table().departures.depart_in_pieces(departure, owner=session.number)
                await sum_in_turns(steps, is_long=len(departure.rows) > store.get_table().state.step_rows)
                forget_departure(self._stores.db, store.record.uid)
            reach("change.applied")
        store.waiters.wake()
        return done

    async def _renew(self, session: ClientSession, store: OpenedStore, leased: control_pb2.Leased) -> control_pb2.Done:
        check_lease_s(leased.lease_s)
        rows, generations = _decode_leased(store, leased)
        table = store.get_table()
        async with store.write_lock:  # no lease is half over meanwhile
            store.check_present()
            end_s = time.monotonic() + leased.lease_s
            parts = table.leases.renew_in_parts(
                session.number, leased.consumer, rows, generations, end_s, request=leased.request
            )
            num_rows = await sum_in_turns(parts, is_long=len(rows) > table.state.step_rows)
        self._lease_timer.watch(store)
        return control_pb2.Done(num_rows=num_rows)

    def _record(
        self,
        session: ClientSession,
        request: int,
        store: OpenedStore,
        departure: Departure | None,
        done: control_pb2.Done,
        *,
        is_decided: bool,
    ) -> None:
        """Puts a change and its answer on record, before the first row leaves.

        Args:
            is_decided: As for ``CatalogDB.begin_transaction``.

        Raises:
            CapacityError: Not even the reserve has room, and it is not decided.
        """
        uid, answer = store.record.uid, done.SerializeToString()
        with self._answers.begin_transaction(
            session.client_id, request, answer, is_decided=is_decided, uses_reserve=True
        ) as txn:
            self._stores.save_state(store, txn, store.get_table_state())
            self._stores.unfinished_writes.note_left(store, txn, departure)
            renew_draws(uid, store.get_table(), txn)
            if departure is not None:
                save_departure(uid, departure, txn)


async def _plan_departure(
    session: ClientSession, store: OpenedStore, kind: str | None, asked: control_pb2.ChangeRequest
) -> Departure | None:
    """Decides which rows leave, or are consumed, by a change; None: it is another change. Nothing was changed yet that
    a crash would leave half done."""
    table = store.get_table()
    if kind == "delete" and asked.HasField("delete_generations"):
        return await _plan_same_departure(store, asked)
    if kind == "delete":
        named = await _decode_rows(store, asked.delete)
        await call_in_turns(table.state.iter_steps(named.iter_pieces()), table.state.check_live)
        return table.departures.plan_departure(named)
    if kind == "clear":
        return table.departures.plan_clear(resets_counts=asked.resets_counts)
    if kind == "acknowledge":
        leased, consumer = asked.acknowledge, asked.acknowledge.consumer
        rows, generations = _decode_leased(store, leased)
        parts: list[Rows] = []
        found = table.leases.find_acknowledged_in_parts(
            session.number, consumer, rows, generations, request=leased.request
        )
        await call_in_turns(found, parts.append)
        return table.departures.plan_departure(await _join(parts), consumer)
    return None


async def _plan_same_departure(store: OpenedStore, asked: control_pb2.ChangeRequest) -> Departure:
    """Decides that those rows leave that are live and still have the generations that the client has seen."""
    table, capacity = store.get_table(), store.record.capacity

    def decode() -> tuple[Rows, NDArray[Any]]:
        rows = decode_rows(read_list(asked.delete), max_rows=capacity)
        return rows, decode_column("generation", read_list(asked.delete_generations), "<u4", len(rows))

    is_long = asked.delete.file or asked.delete_generations.file or len(asked.delete.data) > PIECE_ROWS
    rows, generations = await asyncio.to_thread(decode) if is_long else decode()
    newest = table.order.last_sequence  # a row that comes from here on is another one
    parts: list[Rows] = []
    await call_in_turns(table.departures.find_same_in_parts(rows, generations), parts.append)
    return table.departures.plan_departure(await _join(parts), newest=newest)


async def _join(parts: list[Rows]) -> RowSet:
    """Returns the rows of some parts, joined in a thread if there are several."""
    if len(parts) == 1:
        return RowSet.from_rows(parts[0])
    return await asyncio.to_thread(lambda: RowSet.from_rows(np.concatenate(parts)))


async def _apply(session: ClientSession, store: OpenedStore, kind: str | None, asked: control_pb2.ChangeRequest) -> int:
    """Makes a change by which no row leaves; returns how many rows it was about."""
    table = store.get_table()
    if kind == "limiter":
        table.set_limiter(Settings.from_json(asked.limiter).limiter)
    elif kind == "sampler":
        table.set_sampler(Settings.from_json(asked.sampler).sampler)
    elif kind == "close":
        table.close()
    elif kind == "forget_draws":
        table.draws.forget_all(table.state, restarts=True)
    elif kind == "give_back":
        leased = asked.give_back
        rows, generations = _decode_leased(store, leased)
        parts = table.leases.give_back_in_parts(
            session.number,
            leased.consumer,
            rows,
            generations,
            request=leased.request,
            uncounts=leased.uncounts,
        )
        return await sum_in_turns(parts, is_long=len(rows) > table.state.step_rows)
    else:
        raise RemoteProtocolError(expected="a change", received=str(kind))
    return 0


async def _set_priorities(store: OpenedStore, asked: control_pb2.Priorities) -> control_pb2.Done:
    rows = decode_rows(asked.rows, max_rows=store.record.capacity)
    priorities = decode_column("priority", asked.priorities, "<f4", len(rows))
    generations = decode_generations(asked.generations, len(rows))
    table = store.get_table()
    part_rows = max(TREE_PIECE_ROWS // len(table.selectors), 64)  # each may have a tree
    parts = [slice(at, at + part_rows) for at in range(0, len(rows), part_rows)]
    skips_gone = asked.is_checked or len(parts) > 1
    if asked.checks_only or len(parts) > 1:  # all are checked before the first is changed

        def check() -> Iterator[None]:
            for part in parts:
                table.check_update(rows[part], priorities[part], generations)
                yield

        await run_in_turns(check())
    if asked.checks_only:
        return control_pb2.Done()

    def update() -> Iterator[int]:
        for part in parts:
            same = None if generations is None else generations[part]
            yield table.update_priority(rows[part], priorities[part].astype(np.float64), same, skips_gone=skips_gone)

    num_skipped = await sum_in_turns(update(), is_long=len(parts) > 1)
    return control_pb2.Done(num_rows=len(rows) - num_skipped, num_skipped=num_skipped)


def _decode_leased(store: OpenedStore, leased: control_pb2.Leased) -> tuple[Rows, NDArray[Any] | None]:
    """Returns the rows that a client has on lease, and their generations, if it knows them."""
    rows = decode_rows(leased.rows, max_rows=store.record.capacity)
    return rows, decode_generations(leased.generations, len(rows))


async def _decode_rows(store: OpenedStore, asked: control_pb2.Rows) -> RowSet:
    """Returns the rows that a client names, decoded in a thread if they are very many."""
    capacity, content = store.record.capacity, asked.data
    if asked.file or len(content) > PIECE_ROWS or has_runs(content):
        rows = await asyncio.to_thread(lambda: RowSet.decode(read_list(asked), max_rows=capacity))
    else:
        rows = RowSet.decode(content, max_rows=capacity)
    if len(rows) > capacity:
        raise RemoteProtocolError(expected=f"at most {capacity} row numbers", received=str(len(rows)))
    return rows


def decode_generations(content: bytes, num_rows: int) -> NDArray[Any] | None:
    """Returns the lower halves of generations in a message; None if there are none.

    Raises:
        InvalidRequestError: Their number is neither one nor that of the rows.
    """
    return decode_column("generation", content, "<u4", num_rows) if content else None
