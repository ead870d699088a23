"""Takes of rows on lease from all shards of a table."""

from __future__ import annotations

from typing import Any

from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.sharded_batches import ShardedTaken
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.content.padding import Pad
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.tables.draws.draw_arguments import Conditions
from tdserve.client.tables.draws.taken_batches import TakenBatches


class ShardTakes:
    """Takes rows of a shared table on lease. Threads: safe.

    Args:
        table: The parts, and calls to them.
        draws: Divides what is drawn among the shards.
    """

    def __init__(self, table: ShardedTable, draws: ShardDraws) -> None:
        self._table = table
        self._draws = draws

    @gather_spans
    def take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> ShardedTaken:
        """Takes rows; arguments, which were checked, and errors as in ``ReplayHandle.take``."""
        drawn = self._draws.draw(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, numpy=numpy),
            num_rows,
            self._table.make_deadline(timeout_s),
            takes_fewer=True,
        )
        return ShardedTaken(self._table, self._draws, drawn)

    def take_batches(
        self,
        num_rows: int,
        conditions: Conditions,
        timeout_s: float | None,
        *,
        device: Any,
        pad: Pad,
        numpy: bool | None,
    ) -> TakenBatches:
        """Returns an iterator over batches that ``take`` takes; what no batch can be is refused here."""
        query = self._table.ask_any_part(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, device=device, numpy=numpy),
            self._table.make_deadline(timeout_s),
        )

        def take(within_s: float) -> ShardedTaken:
            return self.take(num_rows, conditions, within_s, pad=pad, numpy=query.is_numpy)

        seconds = self._table.wait_s if timeout_s is None else timeout_s
        return TakenBatches(take, self._table.name, device=device, timeout_s=seconds)
