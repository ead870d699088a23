"""The commit of rows that were filled: on record, then visible, within one turn of the event loop."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.replay.plans import Arrival
from tdserve.replay.reservation import Reservation
from tdserve.row_numbers import encode_rows
from tdserve.server.answers import Answers
from tdserve.server.entry import Entry
from tdserve.server.recovery.redo import Redo
from tdserve.server.stores import Stores
from tdserve.store.catalog_db import Transaction
from tdserve.v1 import control_pb2


def commit_rows(
    stores: Stores,
    answers: Answers,
    entry: Entry,
    reservation: Reservation,
    arrival: Arrival,
    *,
    client_id: bytes,
    request: int,
    num_last: int | None = None,
    also: Callable[[Transaction], None],
) -> control_pb2.Done:
    """Makes the rows of an extend live.

    The record goes first, then the generations: a crash between the two is repaired from the record.

    Args:
        reservation: Its rows, filled.
        arrival: What is known of them.
        client_id, request: Whose extend it is; a retry gets the same answer.
        num_last: Of several extends together: rows of the last, whose number ``request`` is.
        also: What changes on record with it.

    Raises:
        StoreNotFoundError: The store was deleted. Nothing was changed.
    """
    entry.check_present()
    table = entry.replay_table()
    table.arrive(reservation, arrival)
    is_one = num_last is None or num_last == len(reservation)
    done = control_pb2.Done(
        indices=reservation.encoded if is_one else encode_rows(reservation.rows[len(reservation) - (num_last or 0) :])
    )
    redo = Redo.of(entry.record.uid, entry.generation_values(), reservation.rows, encoded=reservation.encoded)
    state = entry.table_state()
    state["inserts"] += len(reservation)
    with answers.transaction(client_id, request, done.SerializeToString()) as txn:
        redo.save(txn)
        also(txn)
        stores.save_state(entry, txn, state)
    table.commit(reservation, arrival)
    entry.changed.wake()
    return done
