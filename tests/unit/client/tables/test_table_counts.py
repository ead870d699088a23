from __future__ import annotations

from tdserve.client.tables.table_counts import LastCounts, TableCounts
from tdserve.v1 import control_pb2


def test_last_counts_when_an_answer_has_them_then_those_and_else_as_before() -> None:
    counts = LastCounts(3, 5)
    counts.update(control_pb2.Done())
    assert counts.newest == TableCounts(3, 5)
    counts.update(control_pb2.Done(counts=control_pb2.TableCounts(rows=0, inserts=7)))
    assert counts.newest == TableCounts(0, 7)
