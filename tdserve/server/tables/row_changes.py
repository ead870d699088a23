"""Changes of replay tables without content: priorities, deletions, limiters, acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.base.failpoints import reach
from tdserve.messages.long_lists import read_list
from tdserve.messages.row_numbers import PIECE_ROWS, TREE_PIECE_ROWS, decode_column, decode_rows, has_runs
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.settings import Settings
from tdserve.server.counts import make_counts
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.opened_store import OpenedStore
from tdserve.server.recovery.draw_records import erase_draws
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.turns import call_in_turns, run_in_turns, sum_in_turns
from tdserve.v1 import control_pb2


class RowChanges:
    """Serves the changes of replay tables that bring no rows.

    Args:
        stores: All stores of the server.
        answers: Answers to committed requests, for their retries.
    """

    def __init__(self, stores: Stores, answers: CommittedAnswers) -> None:
        self._stores = stores
        self._answers = answers

    async def change(self, session: ClientSession, request: int, asked: control_pb2.ChangeRequest) -> control_pb2.Done:
        """Changes a table, whole or not at all.

        Raises:
            SelectionError, InvalidRequestError, WrongStateError, CapacityError: Nothing was changed.
        """
        store = self._stores.get(asked.store)
        store.get_table()
        kind = asked.WhichOneof("change")
        if kind == "priorities":  # it is safe to repeat, so nothing is recorded
            done = await _set_priorities(store, asked.priorities)
            if not asked.priorities.checks_only:
                store.waiters.wake()
            return done
        async with store.write_lock:  # no row is half written meanwhile
            store.check_present()
            if (answered := self._answers.find_earlier(session.client_id, request)) is not None:
                return control_pb2.Done.FromString(answered)  # a retry: committed over an ended session
            self._stores.db.check_room()
            done = await self._apply(session, store, kind, asked)
            reach("change.applied")
            store.check_present()
            done.counts.CopyFrom(make_counts(store))
            # Rows leave first, then the record is written: after a crash in between, consumed rows do not come back. So
            # all is decided by now.
            answer = done.SerializeToString()
            with self._answers.begin_transaction(session.client_id, request, answer, is_decided=True) as txn:
                self._stores.save_state(store, txn, store.get_table_state())
                self._stores.unfinished_writes.note_left(store, txn)
                erase_draws(store.record.uid, store.get_table(), txn)
            reach("change.recorded")
        store.waiters.wake()
        return done

    async def _apply(
        self, session: ClientSession, store: OpenedStore, kind: str | None, asked: control_pb2.ChangeRequest
    ) -> control_pb2.Done:
        table = store.get_table()
        if kind == "delete":
            named = await _decode_rows(store, asked.delete)
            await call_in_turns(table.iter_steps(named.iter_pieces()), table.check_live)
            steps = table.delete_in_pieces(named.iter_pieces())
            return control_pb2.Done(num_rows=await sum_in_turns(steps, is_long=len(named) > table.step_rows))
        if kind == "clear":
            steps = table.clear_in_pieces(resets_counts=asked.resets_counts)
            return control_pb2.Done(num_rows=await sum_in_turns(steps, is_long=True))
        if kind == "limiter":
            table.set_limiter(Settings.from_json(asked.limiter).limiter)
        elif kind == "sampler":
            table.set_sampler(Settings.from_json(asked.sampler).sampler)
        elif kind == "close":
            table.close()
        elif kind == "forget_draws":
            table.draws.forget_all(table, restarts=True)
        elif kind == "acknowledge":
            return await _end_leases(store, table.acknowledge_in_parts, session, asked.acknowledge)
        elif kind == "give_back":
            return await _end_leases(store, table.give_back_in_parts, session, asked.give_back)
        else:
            raise RemoteProtocolError(expected="a change", received=str(kind))
        return control_pb2.Done()


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


async def _end_leases(
    store: OpenedStore, end: Callable[..., Iterator[int]], session: ClientSession, asked: control_pb2.Leased
) -> control_pb2.Done:
    rows = decode_rows(asked.rows, max_rows=store.record.capacity)
    parts = end(session.number, asked.consumer, rows, decode_generations(asked.generations, len(rows)))
    is_long = len(rows) > store.get_table().step_rows
    return control_pb2.Done(num_rows=await sum_in_turns(parts, is_long=is_long))


def decode_generations(content: bytes, num_rows: int) -> NDArray[Any] | None:
    """Returns the lower halves of generations in a message; None if there are none.

    Raises:
        InvalidRequestError: Their number is neither one nor that of the rows.
    """
    return decode_column("generation", content, "<u4", num_rows) if content else None
