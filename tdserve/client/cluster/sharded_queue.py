"""Queues that several servers share."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.cluster.cluster_servers import ClusterServers
from tdserve.client.cluster.shard_draws import ShardDraws
from tdserve.client.cluster.sharded_batches import ShardedTaken
from tdserve.client.cluster.sharded_table import ShardedTable
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.session.call_traces import gather_spans
from tdserve.client.tables.draw_arguments import Conditions, check_lease_s, check_min_rows, check_num_rows
from tdserve.client.tables.taken_batches import TakenBatches
from tdserve.client.tables.taking import to_numbers
from tdserve.rules.placement import PlacementRecord


@leave_modes_in_calls
class ShardedQueueHandle(ShardedTable):
    """A queue that several servers share; calls as of :class:`tdserve.QueueHandle`.

    Each shard is in order. A row is overtaken by at most the rows that waited in the other shards when it was written,
    on average: a reader divides each batch among the shards at random, in proportion to the rows that wait there.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._draws = ShardDraws(self)

    @gather_spans
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
        """Takes rows; arguments, results and errors as of ``QueueHandle.take``."""
        num_rows = check_num_rows(num_rows, None)
        deadline = self.make_deadline(timeout_s)
        fewest, lasting_s = check_min_rows(min_rows, num_rows), check_lease_s(lease_s)
        conditions = Conditions(max_lag=max_lag, min_rows=fewest, lease_s=lasting_s)
        drawn = self._draws.draw(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, numpy=numpy),
            num_rows,
            deadline,
            takes_fewer=True,
        )
        taken = ShardedTaken(self, self._draws, drawn)
        return taken if ack else taken.rows

    def ack(self, rows: Any, *, timeout_s: float | None = None) -> None:
        """Acknowledges rows that were taken with ``ack=False``; those of each shard together.

        Arguments and errors as of ``QueueHandle.ack``.
        """
        to_numbers(rows, table=self.name)
        self.change_rows(
            rows,
            self.make_deadline(timeout_s),
            lambda part, some, _: part.ack(some),
            done="acknowledged",
        )

    def renew(self, rows: Any, lease_s: float, *, timeout_s: float | None = None) -> None:
        """Renews the lease of rows; see ``QueueHandle.renew``. Rows that are not named are renewed with those of the
        same shard; ``ShardedTaken.renew`` renews all."""
        self.change_rows(
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
        """Returns an iterator that takes rows until all shards are closed and drained; arguments and errors as of
        ``QueueHandle.batches``."""
        num_rows = check_num_rows(num_rows, device)
        wait_s, deadline = self._get_timeout_s(timeout_s), self.make_deadline(timeout_s)
        fewest, lasting_s = check_min_rows(min_rows, num_rows), check_lease_s(lease_s)
        conditions = Conditions(max_lag=max_lag, min_rows=fewest, lease_s=lasting_s)
        query = self.ask_any_part(
            lambda part: part.make_query(conditions, is_lease=True, pad=pad, device=device, numpy=numpy), deadline
        )
        options: dict[str, Any] = {"min_rows": min_rows, "max_lag": max_lag, "lease_s": lease_s}
        options |= {"pad": pad, "numpy": query.is_numpy}

        def take(within_s: float) -> Any:
            return self.take(num_rows, timeout_s=within_s, **options)

        return TakenBatches(take, self.name, device=device, timeout_s=wait_s)
