"""Takes of rows on lease from all shards of a table."""

from __future__ import annotations

from typing import Any

import torch

from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.sharded_batches import ShardedTaken
from tdserve.client.cluster.tables.sharded_rows import ShardedRows
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.content.padding import Pad
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.tables.draws.draw_arguments import Conditions
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.row_takes import RowTakes
from tdserve.client.tables.draws.taking import to_numbers


class ShardTakes(RowTakes):
    """Takes rows of a shared table on lease. Threads: safe.

    Args:
        table: The parts, and calls to them.
        rows: Finds the parts of rows by their numbers.
        draws: Divides what is drawn among the shards.
    """

    _table: ShardedTable

    def __init__(self, table: ShardedTable, rows: ShardedRows, draws: ShardDraws) -> None:
        self._table = table
        self._rows = rows
        self._draws = draws

    @gather_spans
    def take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> ShardedTaken:
        """See ``RowTakes``."""
        drawn = self._draws.draw(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, numpy=numpy),
            num_rows,
            self._table.make_deadline(timeout_s),
            takes_fewer=True,
        )
        return ShardedTaken(self._table, self._draws, drawn)

    def _make_query_of_batches(self, conditions: Conditions, timeout_s: float | None, **form: Any) -> Query:
        def make(part: Any) -> Query:
            query: Query = part.make_query(conditions, is_lease=True, **form)
            return query

        return self._table.ask_any_part(make, self._table.make_deadline(timeout_s))

    def acknowledge(self, rows: Any, timeout_s: float | None, consumer: str = "") -> None:
        """See ``RowTakes``; the rows of each shard are acknowledged together."""
        to_numbers(rows, table=self._table.name)

        def acknowledge_some(part: Any, some: Any, _: torch.Tensor) -> None:
            part._takes.acknowledge(some, None, consumer)

        self._rows.change(rows, self._table.make_deadline(timeout_s), acknowledge_some, done="acknowledged")

    def renew(self, rows: Any, lease_s: float, timeout_s: float | None, consumer: str = "") -> None:
        """See ``RowTakes``; the rows of each shard are renewed together."""

        def renew_some(part: Any, some: Any, _: torch.Tensor) -> None:
            part._takes.renew(some, lease_s, None, consumer)

        self._rows.change(rows, self._table.make_deadline(timeout_s), renew_some, done="renewed")
