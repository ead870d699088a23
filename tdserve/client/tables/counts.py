"""How many rows a table has, and how many came: asked for, or as the last answer told."""

from __future__ import annotations

from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls import SessionClient
from tdserve.client.session.session import Session
from tdserve.client.session.timeouts import answer_timeout_s
from tdserve.v1 import control_pb2


class TableCounts(NamedTuple):
    """Of a table at one moment.

    Attributes:
        rows: Live ones.
        inserts: Rows ever committed, or since the counts were last reset.
    """

    rows: int
    inserts: int


class ToldCounts:
    """What the last answer told. Threads: safe; of two answers at a time either may be the last.

    Args:
        rows, inserts: As the table's description has them.
    """

    def __init__(self, rows: int, inserts: int) -> None:
        self.newest = TableCounts(rows, inserts)

    def take(self, done: control_pb2.Done) -> None:
        """Keeps what an answer tells, if it does."""
        if done.HasField("counts"):
            self.newest = TableCounts(done.counts.rows, done.counts.inserts)


def ask_counts(client: SessionClient, table: str, deadline: Deadline) -> control_pb2.Done:
    """The answer that tells them; one message there and one back."""

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        asked = control_pb2.SampleRequest(store=table, asks_counts=True)
        pending = session.send(request, sample=asked)
        return pending.wait(answer_timeout_s(deadline), f"the number of rows of {table!r}").done

    return client.call(attempt, deadline)
