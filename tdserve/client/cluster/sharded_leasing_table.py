"""What queues and replays of several servers share: rows are drawn from all shards, and taken on lease."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.cluster.cluster_servers import ClusterServers
from tdserve.client.cluster.shard_draws import ShardDraws
from tdserve.client.cluster.sharded_batches import ShardedTaken
from tdserve.client.cluster.sharded_table import ShardedTable
from tdserve.client.content.padding import Pad
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.tables.draw_arguments import Conditions
from tdserve.client.tables.taken_batches import TakenBatches
from tdserve.rules.placement import PlacementRecord


class ShardedLeasingTable(ShardedTable):
    """A table of several servers from which rows are taken on lease."""

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._draws = ShardDraws(self)

    @gather_spans
    def _take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> ShardedTaken:
        """Takes rows; arguments, which were checked, and errors as in ``take``."""
        drawn = self._draws.draw(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, numpy=numpy),
            num_rows,
            self.make_deadline(timeout_s),
            takes_fewer=True,
        )
        return ShardedTaken(self, self._draws, drawn)

    def _take_batches(
        self,
        num_rows: int,
        conditions: Conditions,
        timeout_s: float | None,
        *,
        device: Any,
        pad: Pad,
        numpy: bool | None,
    ) -> TakenBatches:
        """Returns an iterator over batches that ``_take`` takes; what no batch can be is refused here."""
        query = self.ask_any_part(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, device=device, numpy=numpy),
            self.make_deadline(timeout_s),
        )

        def take(within_s: float) -> ShardedTaken:
            return self._take(num_rows, conditions, within_s, pad=pad, numpy=query.is_numpy)

        return TakenBatches(take, self.name, device=device, timeout_s=self._get_timeout_s(timeout_s))
