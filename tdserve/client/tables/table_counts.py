"""The number of rows and inserts of a table, requested or from the last answer."""

from __future__ import annotations

from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.v1 import control_pb2


class TableCounts(NamedTuple):
    """Counts of a table at one moment.

    Attributes:
        rows: Live ones.
        inserts: Rows ever stored, or since the counts were last reset.
    """

    rows: int
    inserts: int


class LastCounts:
    """The counts in the last answer. Threads: safe; of two answers at the same time either may count as the last.

    Args:
        rows, inserts: As in the table's description.
    """

    def __init__(self, rows: int, inserts: int) -> None:
        self.newest = TableCounts(rows, inserts)

    def update(self, done: control_pb2.Done) -> None:
        """Keeps the counts of an answer, if it has them."""
        if done.HasField("counts"):
            self.newest = TableCounts(done.counts.rows, done.counts.inserts)


def ask_counts(
    client: SessionClient, table: str, deadline: Deadline, *, kind: control_pb2.StoreKind
) -> control_pb2.Done:
    """Requests the counts of a table of this kind, with one message each way; returns the answer."""

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        asked = control_pb2.SampleRequest(store=table, asks_counts=True, kind=kind)
        pending = session.send(request, sample=asked)
        return pending.wait(compute_answer_timeout_s(deadline), f"the number of rows of {table!r}").done

    return client.call(attempt, deadline, store=table)
