"""The commit of filled rows: they are recorded, then made visible. It takes one turn of the event loop, or several for
very many rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tdserve.base.failpoints import reach
from tdserve.messages.row_numbers import Rows, encode_rows
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.sample_ages import note_arrival
from tdserve.rules.replay.table import Table
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.idempotency import Answer, CommittedAnswers
from tdserve.server.execution.turns import call_in_turns, drop_references
from tdserve.server.open_store.counts import make_counts
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.redo_log import RedoEntry
from tdserve.store.database.catalog_db import Transaction
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.v1 import control_pb2


def commit_rows(
    stores: Stores,
    answers: CommittedAnswers,
    store: OpenedStore,
    reservation: Reservation,
    arrival: Arrival,
    extends: Sequence[ClaimedRows],
    *,
    instead_of: int | None = None,
    uses_reserve: bool = False,
    also: Callable[[Transaction], None],
) -> control_pb2.Done:
    """Makes the rows of extends live, and returns the answer to the last extend.

    The record is written first, then the generations: a crash between the two is repaired from the record.

    Args:
        reservation: The filled rows.
        arrival: The rows' data.
        extends: The extends, in the order of their rows, whose retries get the same answers. Earlier extends may be
            missing: then their rows come first.
        instead_of: Earlier request of the last client whose answer is not needed any more.
        uses_reserve: Whether the catalog's reserve may be used, since the extends were acknowledged.
        also: Makes further changes in the same transaction.

    Raises:
        StoreNotFoundError: The store was deleted. Nothing was changed.
    """
    store.check_present()
    table = store.get_table()
    *others, last = _make_answers(store, reservation, extends)
    generations = table.ring.compute_generations(reservation)
    redo = RedoEntry(store.record.uid, reservation.rows, generations, reservation.encoded)
    table.arrivals.arrive(reservation.rows, arrival)
    note_arrival(table.state, len(reservation), time.monotonic())
    try:
        client_id, request, done = last
        with answers.begin_transaction(
            client_id,
            request,
            done.SerializeToString(),
            others=[Answer(each.client_id, each.request, each.done.SerializeToString()) for each in others],
            instead_of=instead_of,
            uses_reserve=uses_reserve,
        ) as txn:
            _put_on_record(stores, store, txn, redo)
            also(txn)
    except BaseException:
        table.arrivals.take_back(reservation.rows, arrival)
        raise
    reach("commit.recorded")
    table.arrivals.commit(reservation)
    reach("commit.shown")
    store.waiters.wake()
    return done


class _ExtendAnswer(NamedTuple):
    client_id: bytes
    request: int
    done: control_pb2.Done


def _make_answers(
    store: OpenedStore, reservation: Reservation, extends: Sequence[ClaimedRows]
) -> Iterator[_ExtendAnswer]:
    counts = make_counts(store, num_coming=len(reservation))
    start = len(reservation) - sum(each.num_rows for each in extends)
    for client_id, request, num_rows in extends:
        is_whole = num_rows == len(reservation)
        indices = reservation.encoded if is_whole else encode_rows(reservation.rows[start : start + num_rows])
        start += num_rows
        yield _ExtendAnswer(client_id, request, control_pb2.Done(counts=counts, indices=indices))


async def commit_in_turns(
    stores: Stores,
    answers: CommittedAnswers,
    store: OpenedStore,
    reservation: Reservation,
    settle: Callable[[], Arrival],
    *,
    client_id: bytes,
    request: int,
    also: Callable[[Transaction], None],
) -> control_pb2.Done:
    """Makes the rows of a long extend live, a part at a time; whole or not at all, also after a crash.

    The caller makes sure that no request begins to group the table's rows meanwhile. Arguments and errors are those of
    ``commit_rows``.

    Args:
        settle: Returns the rows' data, as of now.
    """
    store.check_present()
    table = store.get_table()
    step_rows = table.state.step_rows
    arrived: list[tuple[Rows, Arrival]] = []
    async with store.link_lock:
        try:
            for start in range(0, len(reservation), step_rows):
                part = slice(start, start + step_rows)
                arrived.append((reservation.rows[part], settle().select_part(part)))
                table.arrivals.arrive(*arrived[-1], is_on_record_later=True)
                note_arrival(table.state, len(arrived[-1][0]), time.monotonic())
                await asyncio.sleep(0)
            redo = await asyncio.to_thread(_make_redo_entry, store, table, reservation)  # nothing changes what it reads
            store.check_present()
            table.arrivals.forget_arriving()
            done = control_pb2.Done(counts=make_counts(store, num_coming=len(reservation)), indices=reservation.encoded)
            with answers.begin_transaction(client_id, request, done.SerializeToString()) as txn:
                _put_on_record(stores, store, txn, redo)
                also(txn)
        except BaseException:
            table.arrivals.forget_arriving()
            await call_in_turns(reversed(arrived), lambda each: table.arrivals.take_back(*each))
            raise
    reach("long-commit.recorded")
    table.state.num_coming = len(reservation)
    rest: Reservation | None = reservation
    while rest is not None:
        shown, rest = table.ring.split(rest, table.state.step_rows)
        table.state.num_coming -= len(shown)
        table.arrivals.commit(shown)
        reach("long-commit.part-shown")
        await asyncio.sleep(0)
    redo.forget(stores.db)
    last_references: list[Any] = [redo, rest, shown, arrived]
    del redo, rest, shown, arrived
    drop_references(last_references, num_rows=len(reservation))
    store.waiters.wake()
    return done


def _make_redo_entry(store: OpenedStore, table: Table, reservation: Reservation) -> RedoEntry:
    """Returns the redo log entry of a long commit, already encoded."""
    generations = table.ring.compute_generations(reservation)
    redo = RedoEntry(store.record.uid, reservation.rows, generations, reservation.encoded, is_long=True)
    _ = redo.record
    return redo


def _put_on_record(stores: Stores, store: OpenedStore, txn: Transaction, redo: RedoEntry) -> None:
    redo.save(txn)
    state = store.get_table_state()
    state["inserts"] += len(redo.rows)
    stores.save_state(store, txn, state)
