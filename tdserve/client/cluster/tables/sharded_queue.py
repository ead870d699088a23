"""Queues that several servers share."""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.shard_takes import ShardTakes
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.tables.queue_calls import QueueCalls
from tdserve.rules.placement import PlacementRecord


@leave_modes_in_calls
class ShardedQueueHandle(QueueCalls, ShardedTable):
    """A queue that several servers share; calls as in :class:`tdserve.QueueHandle`.

    Each shard is in order. A row is overtaken by at most the rows that waited in the other shards when it was written,
    on average: a reader divides each batch among the shards at random, in proportion to the rows that wait there.

    ``ack`` acknowledges the rows of each shard together, and ``renew`` renews those that are not named with those of
    the same shard; ``ShardedTaken.renew`` renews all. An iterator ends when all shards are closed and drained.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._takes = ShardTakes(self, self._rows, ShardDraws(self))
