"""Extends of a table: rows are captured in its structure, and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SpecMismatchError, TooLargeError
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.tables.extends.destack import destack
from tdserve.client.tables.extends.extend_parts import ExtendPart
from tdserve.client.tables.extends.given_rows import GivenRows, is_plain_batch
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.retype_table import retype, was_densified
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.table_policy import add_policy_news
from tdserve.messages.content import ADDED_KEYS
from tdserve.structure.captures.array_dicts import read_rows
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.stacks.elements import restack_by_rows
from tdserve.structure.trees.tree import Path
from tdserve.v1 import content_pb2, control_pb2


class RowExtends:
    """Writes rows to a table. Threads: safe.

    Args:
        table: Which is followed, if it has changed.
    """

    def __init__(self, table: FollowedTable) -> None:
        self._table = table

    def extend(
        self, batch: Any, annotations: RowAnnotations, deadline: Deadline, *, flatten: bool, return_early: bool
    ) -> Any:
        """Writes rows; arguments, result and errors as in ``TableHandle.extend``."""
        stored = self._table.stored
        try:
            return self._extend_once(batch, annotations, flatten, deadline, return_early)
        except TooLargeError:
            if not self._table.has_followed(stored, deadline):
                raise
        return self._extend_once(batch, annotations, flatten, deadline, return_early)  # for a smaller ring

    def _extend_once(
        self, batch: Any, annotations: RowAnnotations, flatten: bool, deadline: Deadline, return_early: bool
    ) -> Any:
        table = self._table
        if isinstance(batch, (dict, list)):
            batch = read_rows(batch, table.spec, store=table.name)
        if isinstance(batch, list) and not batch:  # no rows, in no structure
            index = self._send((), (), annotations, deadline, return_early)
            return self._show_numbers(index) if table.client.numpy else index
        if not flatten and is_plain_batch(batch, table.num_dims, table.capacity):
            captured, keys = self._capture_batch(batch, deadline)
            index = self._send((captured,), keys, annotations, deadline, return_early)
            return self._show_numbers(index) if table.client.numpy else index
        given = GivenRows.read(
            batch, annotations, table.spec, table.settings.sampler, flatten=flatten, store=table.name
        )
        if given.num_rows > table.capacity:
            table.follow_changed(deadline)  # perhaps with room for all of them, or with another limiter
            given = given.keep_newest(table.capacity) if table.settings.overwrites_oldest else given
        captured, keys = self._capture_batch(given.batch, deadline)
        is_cut = given.num_cut > 0
        index = given.restore(self._send((captured,), keys, given.annotations, deadline, return_early, is_cut=is_cut))
        return self._show_numbers(index) if table.client.numpy else index

    def _show_numbers(self, index: Any) -> Any:
        """Returns row numbers, or a future of them, in the form of the client."""
        show = self._table.client.hand_over
        return show(index) if isinstance(index, torch.Tensor) else index.convert(show)

    def check(self, batch: Any, priority: Any) -> None:
        """Raises what ``extend`` would raise; see ``TableHandle.check_rows``."""
        table = self._table
        annotations = RowAnnotations(priority)
        given = GivenRows.read(batch, annotations, table.spec, table.settings.sampler, store=table.name)
        captured, _ = self._capture_batch(given.batch, table.client.make_deadline(None))
        num_rows = captured.spec.batch_size[0]
        annotations.add_to(control_pb2.ExtendRequest(store=table.name, num_rows=num_rows), table.settings)

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, deadline: Deadline
    ) -> torch.Tensor:
        """Writes rows that a writer has captured, all together; see ``TableHandle.extend_captured``."""
        keys = self._table.check_fits(captured[0].spec)
        numbers: torch.Tensor = self._send(captured, keys, annotations, deadline, return_early=False)
        return numbers

    def _send(
        self,
        captured: Sequence[Captured],
        keys: tuple[Path, ...],
        annotations: RowAnnotations,
        deadline: Deadline,
        return_early: bool,
        *,
        is_cut: bool = False,
    ) -> Any:
        table = self._table
        num_rows = sum(each.spec.batch_size[0] for each in captured)
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64)
            return AwaitableFuture.make_done(empty) if return_early else empty
        tried = table.coalescer.write_claimed(captured) if not keys and annotations.is_plain else None
        if isinstance(tried, torch.Tensor):
            return AwaitableFuture.make_done(tried) if return_early else tried
        request = control_pb2.ExtendRequest(store=table.name, num_rows=num_rows, kind=table.kind)
        request.keys.extend(content_pb2.Path(parts=path) for path in keys)
        annotations.add_to(request, table.settings)
        add_policy_news(request, table.client, table.settings.policy)
        number = None if tried is None else tried.request
        part = ExtendPart.from_request(captured, request, deadline, number=number)
        if return_early:
            table.coalescer.submit(part)
            return part.future
        if number is None and table.coalescer.is_waiting:  # these were first
            return table.coalescer.submit_and_wait(part)
        capacity = table.capacity
        while True:
            stored = table.stored
            try:
                index = table.coalescer.send(part)
                break
            except SpecMismatchError:
                if not table.has_followed(stored, deadline):
                    raise
                if is_cut and table.capacity != capacity:  # the table may have room now for what was cut off
                    raise
                part = part._replace(number=None)  # nothing was stored under the first number
        table.is_in_use = True
        return index

    def _capture_batch(self, batch: Any, deadline: Deadline) -> tuple[Captured, tuple[Path, ...]]:
        """Captures a batch; also returns the keys of its leaves, none if it has all of them.

        The first rows decide whether a table accepts rows that differ in size: nested tensors do, whatever their
        lengths.
        """
        table = self._table
        try:
            found = self._capture_fitting(batch)
            if table.is_in_use or not was_densified(batch, found[0].spec):
                return found
        except SpecMismatchError:
            if (columns := destack(batch, table.spec)) is not None:
                return self._capture_fitting(columns)
            if table.follow_changed(deadline):
                return self._capture_fitting(batch)
            if table.is_in_use:
                raise
        now = retype(table.client, table.name, table.spec, batch, deadline, kind=table.shown_kind)
        if now is not None:
            table.follow(now)
        return self._capture_fitting(batch)

    def _capture_fitting(self, batch: Any) -> tuple[Captured, tuple[Path, ...]]:
        table = self._table
        captured = capture(
            batch,
            store=table.name,
            like=table.stored,
            allow_pickle=table.client.allow_pickle,
            ignores=ADDED_KEYS,
        )
        is_deep = len(captured.spec.batch_size) == table.num_dims
        if not is_deep and (rows := restack_by_rows(batch)) is not batch:
            return self._capture_fitting(rows)
        return captured, table.check_fits(captured.spec)
