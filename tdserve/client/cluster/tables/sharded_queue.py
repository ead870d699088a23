"""Queues that several servers share."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.shard_takes import ShardTakes
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.tables.draws.draw_arguments import Conditions, check_num_rows
from tdserve.client.tables.draws.taken_batches import TakenBatches
from tdserve.client.tables.draws.taking import to_numbers
from tdserve.rules.placement import PlacementRecord


@leave_modes_in_calls
class ShardedQueueHandle(ShardedTable):
    """A queue that several servers share; calls as in :class:`tdserve.QueueHandle`.

    Each shard is in order. A row is overtaken by at most the rows that waited in the other shards when it was written,
    on average: a reader divides each batch among the shards at random, in proportion to the rows that wait there.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._takes = ShardTakes(self, ShardDraws(self))

    def take(
        self,
        num_rows: int,
        *,
        min_rows: int | None = None,
        max_lag: int | None = None,
        ack: bool = True,
        lease_s: float | None = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Takes rows; arguments, results and errors as in ``QueueHandle.take``."""
        num_rows = check_num_rows(num_rows, None)
        conditions = Conditions(max_lag=max_lag).adapt_to_take(num_rows, min_rows, lease_s)
        taken = self._takes.take(num_rows, conditions, timeout_s, pad=pad, numpy=numpy)
        return taken if ack else taken.rows

    def ack(self, rows: Any, *, timeout_s: float | None = None) -> None:
        """Acknowledges rows that were taken with ``ack=False``; those of each shard together.

        Arguments and errors as in ``QueueHandle.ack``.
        """
        to_numbers(rows, table=self.name)
        self._rows.change(
            rows,
            self.make_deadline(timeout_s),
            lambda part, some, _: part.ack(some),
            done="acknowledged",
        )

    def renew(self, rows: Any, lease_s: float, *, timeout_s: float | None = None) -> None:
        """Renews the lease of rows; see ``QueueHandle.renew``. Rows that are not named are renewed with those of the
        same shard; ``ShardedTaken.renew`` renews all."""
        self._rows.change(
            rows,
            self.make_deadline(timeout_s),
            lambda part, some, _: part.renew(some, lease_s),
            done="renewed",
        )

    def batches(
        self,
        num_rows: int,
        *,
        min_rows: int | None = None,
        max_lag: int | None = None,
        lease_s: float | None = None,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> TakenBatches:
        """Returns an iterator that takes rows until all shards are closed and drained; arguments and errors as in
        ``QueueHandle.batches``."""
        num_rows = check_num_rows(num_rows, device)
        conditions = Conditions(max_lag=max_lag).adapt_to_take(num_rows, min_rows, lease_s)
        return self._takes.take_batches(num_rows, conditions, timeout_s, device=device, pad=pad, numpy=numpy)
