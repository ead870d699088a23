"""Changes of replay tables that have no content: priorities, deletions, limiters, acknowledgements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import RemoteProtocolError
from tdserve.replay.settings import Settings
from tdserve.row_numbers import column_of, decode_rows
from tdserve.server.answers import Answers
from tdserve.server.entry import Entry
from tdserve.server.sessions.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.v1 import control_pb2


class Changes:
    """What sessions ask of replay tables beside rows.

    Args:
        stores: The book.
        answers: Of requests that were committed, for their retries.
    """

    def __init__(self, stores: Stores, answers: Answers) -> None:
        self._stores = stores
        self._answers = answers

    async def change(self, session: ClientSession, request: int, asked: control_pb2.ChangeRequest) -> control_pb2.Done:
        """Changes a table, whole or not at all.

        Raises:
            SelectionError, InvalidRequestError, WrongStateError: Nothing was changed.
        """
        entry = self._stores.get(asked.store)
        entry.replay_table()
        kind = asked.WhichOneof("change")
        if kind == "priorities":  # to set one twice does no harm, so nothing is written down
            done = _set_priorities(entry, asked.priorities)
            entry.changed.wake()
            return done
        async with entry.write_lock:  # no row is half written
            entry.check_present()
            done = self._apply(session, entry, kind, asked)
            # The rows go first, the record second: after a crash in between, what was consumed does not come back.
            with self._answers.transaction(session.client_id, request, done.SerializeToString()) as txn:
                self._stores.save_state(entry, txn, entry.table_state())
                self._stores.unfinished.note_left(entry, txn)
        entry.changed.wake()
        return done

    def _apply(
        self, session: ClientSession, entry: Entry, kind: str | None, asked: control_pb2.ChangeRequest
    ) -> control_pb2.Done:
        table = entry.replay_table()
        if kind == "delete":
            return control_pb2.Done(
                num_rows=table.delete(decode_rows(asked.delete.rows, max_rows=entry.record.capacity))
            )
        if kind == "clear":
            return control_pb2.Done(num_rows=table.clear())
        if kind == "limiter":
            table.set_limiter(Settings.from_json(asked.limiter).limiter)
        elif kind == "close":
            table.close()
        elif kind == "acknowledge":
            rows, generations = _leased(entry, asked.acknowledge)
            consumer = asked.acknowledge.consumer
            return control_pb2.Done(num_rows=table.acknowledge(session.number, consumer, rows, generations))
        elif kind == "give_back":
            rows, generations = _leased(entry, asked.give_back)
            table.give_back(session.number, asked.give_back.consumer, rows, generations)
            return control_pb2.Done(num_rows=len(rows))
        else:
            raise RemoteProtocolError(expected="a change", received=str(kind))
        return control_pb2.Done()


def _set_priorities(entry: Entry, asked: control_pb2.Priorities) -> control_pb2.Done:
    rows = decode_rows(asked.rows, max_rows=entry.record.capacity)
    priorities = column_of("priority", asked.priorities, "<f4", len(rows)).astype(np.float64)
    generations = generations_of(asked.generations, len(rows))
    num_skipped = entry.replay_table().update_priority(rows, priorities, generations)
    return control_pb2.Done(num_rows=len(rows) - num_skipped, num_skipped=num_skipped)


def _leased(entry: Entry, asked: control_pb2.Leased) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
    rows = decode_rows(asked.rows, max_rows=entry.record.capacity)
    return rows, generations_of(asked.generations, len(rows))


def generations_of(content: bytes, num_rows: int) -> NDArray[Any] | None:
    """Lower halves of generations as messages carry them; None when there are none.

    Raises:
        InvalidRequestError: There are neither as many as rows nor one.
    """
    return column_of("generation", content, "<u4", num_rows) if content else None
