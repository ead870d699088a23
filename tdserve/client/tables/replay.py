"""The handle of a replay, whose rows learners sample again and again."""

from __future__ import annotations

from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.client.content.devices import to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.step_counts import StepCount
from tdserve.client.tables.change_requests import ask_priorities, change_priorities, encode_priorities
from tdserve.client.tables.draws.batches import Batches
from tdserve.client.tables.draws.draw_arguments import Ahead, Conditions
from tdserve.client.tables.draws.sampling import draw_whole_rows
from tdserve.client.tables.draws.share import Share
from tdserve.client.tables.draws.taking import take_and_acknowledge
from tdserve.client.tables.replay_calls import ReplayCalls
from tdserve.client.tables.row_arguments import to_row_numbers
from tdserve.client.tables.table_handle import TableHandle
from tdserve.v1 import control_pb2


@leave_modes_in_calls
class ReplayHandle(ReplayCalls[Batches], TableHandle):
    """A replay store: a ring of rows that writers extend and readers sample. Threads: safe."""

    _kind = control_pb2.STORE_KIND_REPLAY

    def _sample(
        self, num_rows: int, conditions: Conditions, share: Share | None, deadline: Deadline, **form: Any
    ) -> Any:
        is_lease = bool(conditions.consumer) and share is None

        def draw(own: Share | None = None) -> Any:
            query = self._draws.make_query(conditions, is_lease=is_lease, share=own, deadline=deadline, **form)
            if is_lease:
                return take_and_acknowledge(self._client, query, num_rows, deadline)
            td = draw_whole_rows(self._client, query, num_rows, num_batches=1, deadline=deadline).build()
            return query.hand_over(to_device(td, query.device))

        if share is None:
            return self._table.follow_and_retry(draw, deadline)
        asked = share

        def draw_counted() -> Any:
            with self._get_step_count(asked).take(asked.step if asked.is_named else None) as number:
                return draw(asked.move_to(number))

        return self._table.follow_and_retry(draw_counted, deadline)

    def _get_step_count(self, share: Share) -> StepCount:
        return self._client.step_counts.get(self._table.uid, share.rank, share.world_size, share.run)

    def _forget_draws(self, timeout_s: float | None) -> None:
        self._change(timeout_s, forget_draws=True)
        self._client.step_counts.restart(self._table.uid)

    def _update_priority(
        self, index: Any, priority: Any, generation: Any, timeout_s: float | None, return_early: bool
    ) -> Any:
        messages = encode_priorities(index, priority, generation)
        deadline = self._client.make_deadline(timeout_s)

        def update() -> int:
            return change_priorities(self._client, self.name, deadline, messages, **self._table.meant)

        return self._client.perform(update, deadline, return_early)

    def _get_priorities(self, index: Any, timeout_s: float | None) -> Any:
        numbers, deadline = to_row_numbers(index), self._client.make_deadline(timeout_s)
        found = ask_priorities(self._client, self.name, numbers, deadline, **self._table.meant)
        return self._client.hand_over(torch.from_numpy(found))

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
    ) -> Batches:
        query = self._draws.make_query(conditions, share=share, deadline=deadline, **form)
        return Batches(
            self._client,
            query,
            num_rows,
            ahead=ahead,
            device=query.device,
            timeout_s=self._client.timeout_s if timeout_s is None else timeout_s,
            renew=self._table.renew,
            step_count=None if share is None else self._get_step_count(share),
        )
