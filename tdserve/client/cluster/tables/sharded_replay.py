"""Replay stores that several servers share: samples are drawn from all of them as from one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, TDServeError, TransportError, WrongStateError
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.directory import compute_look_s
from tdserve.client.cluster.tables.drawn_parts import DrawnPart
from tdserve.client.cluster.tables.shard_draws import ShardDraws
from tdserve.client.cluster.tables.shard_shares import ShardShares
from tdserve.client.cluster.tables.shard_takes import ShardTakes
from tdserve.client.cluster.tables.sharded_batches import ShardedBatches
from tdserve.client.cluster.tables.sharded_table import ShardedTable, select_rows
from tdserve.client.content.devices import resolve_device, to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.session.calls.step_counts import StepCount, StepCounts
from tdserve.client.tables.draws.draw_arguments import Ahead, Conditions
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.share import Share
from tdserve.client.tables.draws.taking import acknowledge, give_back_later, name_rows
from tdserve.client.tables.replay_calls import ReplayCalls
from tdserve.client.tables.row_arguments import spread_generations, spread_priorities, to_row_numbers
from tdserve.rules.lost_servers import PATIENCE_S
from tdserve.rules.placement import PlacementRecord


@leave_modes_in_calls
class ShardedReplayHandle(ReplayCalls[ShardedBatches], ShardedTable):
    """A replay store that several servers share; calls as in :class:`tdserve.ReplayHandle`.

    A sample is divided among the shards by what may be drawn from each: rows, groups, or the sum of their weights. It
    has the distribution of one table. A shard that does not answer is left out: ``is_degraded`` and ``info()`` say so.
    A shard's part is known as of its last answer, at most a twentieth of a second ago.

    With ``rank`` the shards divide a step once, for all ranks: each rank gets as many rows of a shard as the others.
    The first shard keeps how, so a new step needs its server. ``batches`` returns a batch that became too old for
    ``max_lag`` while it waited. ``ack`` and ``renew`` act on the rows of each shard together. With
    ``return_early=True`` the arguments of ``update_priority`` must not change before the future is done.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._draws = ShardDraws(self)
        self._takes = ShardTakes(self, self._rows, self._draws)
        self._shares = ShardShares(self)
        self._step_counts = StepCounts()

    @gather_spans
    def _sample(
        self, num_rows: int, conditions: Conditions, share: Share | None, deadline: Deadline, **form: Any
    ) -> Any:
        if share is None:
            return self._draw_rows(num_rows, conditions, deadline, None, **form)
        with self._get_step_count(share).take(share.step if share.is_named else None) as number:
            return self._draw_rows(num_rows, conditions, deadline, share.move_to(number), **form)

    def _draw_rows(
        self,
        num_rows: int,
        conditions: Conditions,
        deadline: Deadline,
        share: Share | None,
        *,
        device: Any,
        **form: Any,
    ) -> Any:
        """Draws rows; with a share those of a rank in a step, which is not counted."""
        is_lease = bool(conditions.consumer) and share is None
        queries = self._make_queries(conditions, is_lease=is_lease, share=share, device=device, **form)
        if is_lease:
            return self._take_all(queries, num_rows, deadline)
        if share is not None:
            drawn = self._shares.draw(queries, share, num_rows, deadline)
        else:
            drawn = self._draws.draw(queries, num_rows, deadline)
        return self._build(drawn)

    def _build(self, drawn: list[DrawnPart]) -> Any:
        """Returns the rows of all parts in the form that the caller asked for."""
        query = drawn[0].query
        return query.hand_over(to_device(self._draws.join(drawn).build(), query.device))

    def _take_all(self, queries: Callable[[Any], Query], num_rows: int, deadline: Deadline) -> Any:
        """Takes rows and acknowledges them when they are in the form that the caller asked for, so that those of a call
        that raises are given back; takes others for those that it cannot acknowledge. The error of a call that ends in
        between has the rows that were acknowledged as its ``values``: the consumer gets them nowhere else."""
        taken: list[DrawnPart] = []
        found = None
        try:
            while num_missing := num_rows - sum(part.rows.spec.batch_size[0] for part in taken):
                drawn = self._draws.draw(queries, num_missing, deadline)
                try:
                    found = self._build([*taken, *drawn])
                    while drawn:
                        if self._acknowledge(drawn[0], deadline):
                            taken.append(drawn[0])
                        del drawn[0]
                except BaseException:
                    self._draws.give_back(drawn, deadline)
                    raise
        except TDServeError as error:
            if taken:
                error.values = self._build(taken)
            raise
        return found

    def _acknowledge(self, part: DrawnPart, deadline: Deadline) -> bool:
        """Acknowledges rows; returns False if their lease has ended meanwhile, as with a restart of the server, or the
        server does not answer."""
        named = name_rows(part.rows)
        try:
            until = deadline.shorten(min(PATIENCE_S, compute_look_s(deadline)))
            acknowledge(part.client, part.query, named, until)
        except WrongStateError:
            return False
        except (TransportError, DeadlineExceededError) as error:
            if not may_repeat(error, deadline):
                raise
            self._cluster.members.note_silent(self.placement.servers[part.shard])
            give_back_later(part.client, part.query, named)
            return False
        return True

    def _make_queries(self, conditions: Conditions, **options: Any) -> Callable[[Any], Query]:
        return lambda part: part.make_query(conditions, **options)

    def _get_step_count(self, share: Share) -> StepCount:
        return self._step_counts.get(self.name, share.rank, share.world_size, share.run)

    def _forget_draws(self, timeout_s: float | None) -> None:
        deadline = self.make_deadline(timeout_s)
        self._ask_every(lambda _, part: part.forget_draws(), deadline)
        self._shares.forget(deadline)
        self._step_counts.restart(self.name)

    @gather_spans
    def _update_priority(
        self, index: Any, priority: Any, generation: Any, timeout_s: float | None, return_early: bool
    ) -> Any:
        deadline = self.make_deadline(timeout_s)
        num_rows = len(to_row_numbers(index))
        priorities = spread_priorities(priority, num_rows)
        generations = spread_generations(generation, num_rows)

        def update() -> int:
            def change(part: Any, rows: Any, where: torch.Tensor) -> int:
                given = select_rows(generations, where, num_rows)
                found: int = part.update_priority(rows, select_rows(priorities, where, num_rows), generation=given)
                return found

            num_skipped = sum(self._rows.change(index, deadline, change, done="changed"))
            self._draws.forget_masses()
            return num_skipped

        return self._cluster.run_later(update, deadline) if return_early else update()

    def _get_priorities(self, index: Any, timeout_s: float | None) -> Any:
        found = torch.zeros(len(to_row_numbers(index)), dtype=torch.float32)

        def ask(part: Any, rows: Any, where: torch.Tensor) -> None:
            found[where] = torch.as_tensor(part.get_priorities(rows))

        self._rows.change(index, self.make_deadline(timeout_s), ask)
        return self._show(found)

    def _draw_ahead(
        self,
        num_rows: int,
        conditions: Conditions,
        share: Share | None,
        deadline: Deadline,
        *,
        ahead: Ahead,
        timeout_s: float | None,
        **form: Any,
    ) -> ShardedBatches:
        wait_s = self._get_timeout_s(timeout_s)
        form["device"] = resolve_device(form["device"])  # here: each thread has its own device
        # checked before a thread draws anything
        self.ask_any_part(self._make_queries(conditions, is_lease=False, share=share, **form), deadline)

        @gather_spans
        def sample(table: ShardedReplayHandle, own: Share | None) -> Any:
            return table._draw_rows(num_rows, conditions, table.make_deadline(wait_s), own, **form)

        def draw(number: int) -> tuple[Share | None, Any]:
            own = None if share is None else share.move_to(share.step + number)
            return own, sample(self, own)

        counts = None if share is None else self._get_step_count(share)
        return ShardedBatches(draw, self.name, ahead=ahead, timeout_s=wait_s, step_count=counts)
