"""Replay stores that several servers share: samples are drawn from all of them as from one table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from tdserve.client.content.padding import Pad
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.session.calls.step_counts import StepCount, StepCounts
from tdserve.client.tables.draws.draw_arguments import (
    Conditions,
    check_ahead,
    check_num_rows,
)
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.share import Share, parse_table_share
from tdserve.client.tables.draws.taken_batches import TakenBatches
from tdserve.client.tables.draws.taking import acknowledge, give_back_later, name_rows, to_numbers
from tdserve.client.tables.row_arguments import spread_generations, spread_priorities, to_row_numbers
from tdserve.rules.lost_servers import PATIENCE_S
from tdserve.rules.placement import PlacementRecord


@leave_modes_in_calls
class ShardedReplayHandle(ShardedTable):
    """A replay store that several servers share; calls as in :class:`tdserve.ReplayHandle`.

    A sample is divided among the shards by what may be drawn from each: rows, groups, or the sum of their weights. It
    has the distribution of one table. A shard that does not answer is left out: ``is_degraded`` and ``info()`` say so.
    A shard's part is known as of its last answer, at most a twentieth of a second ago.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, deadline=deadline)
        self._draws = ShardDraws(self)
        self._takes = ShardTakes(self, self._draws)
        self._shares = ShardShares(self)
        self._step_counts = StepCounts()

    @gather_spans
    def sample(
        self,
        num_rows: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
        run: str | int | None = None,
        balance: Any = None,
        require: Any = None,
        consumer: str = "",
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows with the table's sampler; arguments, results and errors as in ``ReplayHandle.sample``.

        With ``rank`` the shards divide the step once, for all ranks: each rank gets as many rows of a shard as the
        others. The first shard keeps how, so a new step needs its server.
        """
        num_rows = check_num_rows(num_rows, device)
        deadline = self.make_deadline(timeout_s)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag)
        asked = parse_table_share(self, rank, world_size, step, balance, run, deadline)
        draw = partial(self._draw_rows, num_rows, conditions, deadline, device=device, pad=pad, numpy=numpy)
        if asked is None:
            return draw(None)
        with self._get_step_count(asked).take(asked.step if asked.is_named else None) as number:
            return draw(asked.move_to(number))

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

    def forget_draws(self, *, timeout_s: float | None = None) -> None:
        """Forgets the draws of all steps; see ``ReplayHandle.forget_draws``."""
        deadline = self.make_deadline(timeout_s)
        self._ask_every(lambda _, part: part.forget_draws(), deadline)
        self._shares.forget(deadline)
        self._step_counts.restart(self.name)

    def take(
        self,
        num_rows: int,
        *,
        consumer: str,
        min_rows: int | None = None,
        require: Any = None,
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        ack: bool = True,
        lease_s: float | None = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draws rows for a consumer, which count as had once they are acknowledged; see ``ReplayHandle.take``."""
        num_rows = check_num_rows(num_rows, None)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag).adapt_to_take(
            num_rows, min_rows, lease_s
        )
        taken = self._takes.take(num_rows, conditions, timeout_s, pad=pad, numpy=numpy)
        return taken if ack else taken.rows

    def ack(self, rows: Any, *, consumer: str, timeout_s: float | None = None) -> None:
        """Acknowledges rows that a consumer took with ``ack=False``; those of each shard together.

        Arguments and errors as in ``ReplayHandle.ack``.
        """
        to_numbers(rows, table=self.name)

        def acknowledge_some(part: Any, some: Any, _: torch.Tensor) -> None:
            part.ack(some, consumer=consumer)

        self._rows.change(rows, self.make_deadline(timeout_s), acknowledge_some, done="acknowledged")

    def renew(self, rows: Any, lease_s: float, *, consumer: str, timeout_s: float | None = None) -> None:
        """Renews the lease of rows; see ``ReplayHandle.renew``. Those of each shard are renewed together."""

        def renew_some(part: Any, some: Any, _: torch.Tensor) -> None:
            part.renew(some, lease_s, consumer=consumer)

        self._rows.change(rows, self.make_deadline(timeout_s), renew_some, done="renewed")

    @gather_spans
    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Changes the priorities of rows; arguments, results and errors as in ``ReplayHandle.update_priority``.

        With ``return_early=True`` the arguments must not change before the future is done.
        """
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

    def get_priorities(self, index: Any, *, timeout_s: float | None = None) -> Any:
        """Returns the priorities of rows; see ``ReplayHandle.get_priorities``."""
        found = torch.zeros(len(to_row_numbers(index)), dtype=torch.float32)

        def ask(part: Any, rows: Any, where: torch.Tensor) -> None:
            found[where] = torch.as_tensor(part.get_priorities(rows))

        self._rows.change(index, self.make_deadline(timeout_s), ask)
        return self._show(found)

    def batches(
        self,
        num_rows: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
        run: str | int | None = None,
        balance: Any = None,
        prefetch: int = 4,
        device: Any = None,
        pad: Pad = None,
        drop: float | None = None,
        require: Any = None,
        consumer: str = "",
        min_rows: int | None = None,
        group_by: Any = None,
        group_size: int = 0,
        max_lag: int | None = None,
        lease_s: float | None = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> ShardedBatches | TakenBatches:
        """Returns an iterator over samples, which draws some of them while the caller works; arguments and errors as in
        ``ReplayHandle.batches``. A batch that became too old for ``max_lag`` while it waited is returned."""
        num_rows = check_num_rows(num_rows, device)
        wait_s, deadline = self._get_timeout_s(timeout_s), self.make_deadline(timeout_s)
        conditions = Conditions(require, consumer, group_by, group_size, max_lag).adapt_to_take(
            num_rows, min_rows, lease_s
        )
        share = parse_table_share(self, rank, world_size, step, balance, run, deadline)
        ahead = check_ahead(prefetch, drop, consumer, share, min_rows=min_rows, lease_s=lease_s)
        counts = None if share is None else self._get_step_count(share)
        if share is not None and counts is not None and not share.is_named:
            share = share.move_to(counts.next)
        if consumer and share is None:
            return self._takes.take_batches(num_rows, conditions, timeout_s, device=device, pad=pad, numpy=numpy)
        form = {"device": resolve_device(device), "pad": pad, "numpy": numpy}  # here: each thread has its own device
        # checked before a thread draws anything
        self.ask_any_part(self._make_queries(conditions, is_lease=False, share=share, **form), deadline)

        @gather_spans
        def sample(table: ShardedReplayHandle, own: Share | None) -> Any:
            return table._draw_rows(num_rows, conditions, table.make_deadline(wait_s), own, **form)

        def draw(number: int) -> tuple[Share | None, Any]:
            own = None if share is None else share.move_to(share.step + number)
            return own, sample(self, own)

        return ShardedBatches(draw, self.name, ahead=ahead, timeout_s=wait_s, step_count=counts)
