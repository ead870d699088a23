"""The buffer of a writer: rows are copied in one by one and taken out in batches, in order, within a memory limit.

Only rules: no threads, no clock, nothing is sent from here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.structure.captures.captured import Captured
from tdserve.structure.captures.rows import RowSlots, copy_leaves
from tdserve.structure.trees.tree import Spec

NO_PRIORITY = math.nan
"""Marks a row without one in lists of priorities, which are never NaN."""

NO_VERSION = -1
"""Marks a row without one in lists of policy versions, which begin at 0."""


class Page:
    """Contiguous rows; lists have one element per row, used or not.

    A row counts only when it is complete: an interrupt in the middle leaves nothing behind.

    Attributes:
        slots: Their memory.
        values: Non-tensor leaves, each row's in the order of ``spec.values``; emptied when the row was sent.
        values_nbytes: Encoded size of each row's values.
        waiting_nbytes: Size of the rows that wait.
        priorities: ``NO_PRIORITY`` if none was given.
        policy_versions: ``NO_VERSION`` if none was given.
        ends: Whether the row is the last of its trajectory.
        times_s: When each was appended.
        num_rows: Rows that were put in.
        num_taken: Rows that no longer wait.
        stream: Number of the stream that all of them belong to.
        is_closed: Whether no more rows come.
        is_under_way: Whether rows are being sent from this memory.
    """

    def __init__(self, slots: RowSlots, stream: int) -> None:
        self.slots = slots
        size = len(slots.rows)
        self.values: list[Sequence[Any]] = [()] * size
        self.values_nbytes = [0] * size
        self.waiting_nbytes = 0
        self.priorities = [NO_PRIORITY] * size
        self.policy_versions = [NO_VERSION] * size
        self.ends = [False] * size
        self.times_s = [0.0] * size
        self.num_rows = 0
        self.num_taken = 0
        self.stream = stream
        self.is_closed = False
        self.is_under_way = False

    @property
    def is_used_up(self) -> bool:
        """Whether all rows that it will ever contain were taken."""
        return self.num_taken == self.num_rows and (self.is_closed or self.num_rows == len(self.slots.rows))

    def put(
        self,
        leaves: list[torch.Tensor],
        priority: float,
        now_s: float,
        values: Sequence[Any] = (),
        values_nbytes: int = 0,
        policy_version: int = NO_VERSION,
    ) -> list[torch.Tensor]:
        """Copies a row in; ``values`` must not change any more.

        Returns:
            Views of its leaves in the page.
        """
        number = self.num_rows
        row = self.slots.rows[number]
        copy_leaves(row, leaves)
        self.priorities[number] = priority
        self.policy_versions[number] = policy_version
        self.times_s[number] = now_s
        if values:
            self.values[number] = values
            self.values_nbytes[number] = values_nbytes
            self.waiting_nbytes += values_nbytes
        self.num_rows = number + 1
        return row

    def find_annotations(self, number: int) -> tuple[bool, bool]:
        """Returns whether a row was given a priority, and whether a policy version."""
        return not math.isnan(self.priorities[number]), self.policy_versions[number] != NO_VERSION

    def count_alike(self, max_rows: int, annotations: tuple[bool, bool]) -> int:
        """Counts the waiting rows, from the first one on, with the same kinds of annotations."""
        waiting = slice(self.num_taken, min(self.num_taken + max_rows, self.num_rows))
        given = zip(self.priorities[waiting], self.policy_versions[waiting], strict=True)
        others = (
            number
            for number, (priority, version) in enumerate(given)
            if (not math.isnan(priority), version != NO_VERSION) != annotations
        )
        return next(others, waiting.stop - waiting.start)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are sent together.

    Attributes:
        captured: Their content, in order, one for each run of rows: batch size ``[n, *row]``. It shares memory with the
            buffer until the batch is given back.
        num_rows: At least 1.
        stream: Number of their stream.
        priorities: float64 ``[num_rows]``; None if none was given.
        policy_versions: int64 ``[num_rows]``; None if none was given.
        ends: bool ``[num_rows]``; None if none of them ends a trajectory.
        parts: Page, first row and end of each run of rows.
    """

    captured: tuple[Captured, ...]
    num_rows: int
    stream: int
    priorities: NDArray[np.float64] | None
    policy_versions: NDArray[np.int64] | None
    ends: NDArray[np.bool_] | None
    parts: tuple[tuple[Page, int, int], ...]

    def cut(self, rows: slice) -> list[Captured]:
        """Returns the content of some of the rows, from ``rows.start`` to ``rows.stop``."""
        if rows == slice(0, self.num_rows):
            return list(self.captured)
        found: list[Captured] = []
        begin = 0
        for captured in self.captured:
            end = begin + captured.spec.batch_size[0]
            own = slice(max(rows.start, begin) - begin, min(rows.stop, end) - begin)
            begin = end
            if own.start < own.stop:
                tensors = {path: tensor[own] for path, tensor in captured.tensors.items()}
                values = {path: column[own] for path, column in captured.values.items()}
                found.append(Captured(captured.spec.with_rows(own.stop - own.start), tensors, values, {}))
        return found


class RowBuffer:
    """A queue of rows in pages. Threads: not safe; its owner needs a lock.

    Args:
        spec: Structure of one row.
        page_rows: Rows that are usually sent together.
        max_bytes: Limit for all memory, including pages that wait to be reused.

    Attributes:
        num_under_way: Rows that were taken and not yet returned.

    Raises:
        InvalidRequestError: ``max_bytes`` is too small for two rows.
    """

    def __init__(self, spec: Spec, *, page_rows: int, max_bytes: int) -> None:
        self._spec = spec
        self._batch_spec = spec.with_device(None).prepend((1,)).with_values_per_row()
        self._budget_bytes = max_bytes
        row_bytes = max(RowSlots.compute_nbytes(spec, 1), 1)
        if 2 * row_bytes > self._budget_bytes:
            reason = f"{max_bytes} bytes do not hold two rows of {row_bytes} bytes each"
            raise InvalidRequestError(argument="max_bytes", reason=reason)
        self.page_rows = min(page_rows, self._budget_bytes // (2 * row_bytes))
        self._page_bytes = self.page_rows * row_bytes
        self._pages: deque[Page] = deque()
        self._free: list[RowSlots] = []
        self._num_slots = 0
        self.num_under_way = 0
        self._values_under_way = 0

    @property
    def max_rows(self) -> int:
        """Largest number of rows without non-tensor values that fit."""
        return self._budget_bytes // self._page_bytes * self.page_rows

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return (self._num_slots - len(self._free)) * self._page_bytes + self._values_nbytes

    @property
    def _values_nbytes(self) -> int:
        return self._values_under_way + sum(page.waiting_nbytes for page in self._pages)

    @property
    def num_waiting(self) -> int:
        """Rows that were put in and not yet taken."""
        return sum(page.num_rows - page.num_taken for page in self._pages)

    @property
    def oldest_s(self) -> float:
        """When the first waiting row was put in; infinity if none waits."""
        waiting = (page.times_s[page.num_taken] for page in self._pages if page.num_taken < page.num_rows)
        return next(waiting, math.inf)

    def find_page(self, stream: int, values_nbytes: int = 0, *, num_held: int = 0) -> Page | None:
        """Returns the page for the next row; None if there is no room for it.

        Args:
            stream: The stream of the row.
            values_nbytes: Encoded size of its values. Values of any size fit if no room will be made for them: into an
                empty buffer, and into one whose rows are all held.
            num_held: Waiting rows that cannot be taken before other rows are put in.
        """
        makes_room = self.num_waiting > num_held or self.num_under_way > 0
        if values_nbytes and makes_room and self.nbytes + values_nbytes > self._budget_bytes:
            return None
        last = self._pages[-1] if self._pages else None
        if last is not None and last.num_rows < self.page_rows and last.stream == stream:
            return last
        more_bytes = self._page_bytes + self._values_nbytes + values_nbytes
        if not self._free and self._num_slots * self._page_bytes + more_bytes > self._budget_bytes and makes_room:
            return None
        if last is not None:
            last.is_closed = True
            self._drop_used_up()
        if not self._free:
            self._free.append(RowSlots(self._spec, self.page_rows))
            self._num_slots += 1
        page = Page(self._free.pop(), stream)
        self._pages.append(page)
        return page

    def take(self, max_rows: int) -> Batch:
        """Takes the first waiting rows as one batch of at most ``max_rows``.

        All are of one stream, and either all or none of them have a priority, and a policy version.

        Must not be called when no row waits, nor before the last batch was given back.
        """
        parts: list[tuple[Page, int, int]] = []
        num_rows = 0
        annotations = (False, False)
        for page in self._pages:
            start = page.num_taken
            if start == page.num_rows:
                continue
            if not parts:
                annotations = page.find_annotations(start)
            elif page.stream != parts[0][0].stream:
                break
            length = page.count_alike(max_rows - num_rows, annotations)
            if not length:
                break
            parts.append((page, start, start + length))
            page.num_taken += length
            num_rows += length
            if num_rows == max_rows or page.num_taken < page.num_rows:
                break
        self.num_under_way += num_rows
        for page, start, stop in parts:
            nbytes = sum(page.values_nbytes[start:stop])
            page.waiting_nbytes -= nbytes
            self._values_under_way += nbytes
        batch = self._make_batch(parts, num_rows, annotations)
        for page, _, _ in parts:
            page.is_under_way = True
        self._drop_used_up()
        return batch

    def give_back(self, batch: Batch) -> None:
        """Releases the memory of a batch."""
        self.num_under_way -= batch.num_rows
        self._values_under_way = 0
        if self._spec.values:
            for page, start, stop in batch.parts:
                page.values[start:stop] = [()] * (stop - start)
        for page, _, _ in batch.parts:
            page.is_under_way = False
            if page not in self._pages:
                self._free.append(page.slots)
        self._drop_used_up()

    def _drop_used_up(self) -> None:
        while self._pages and self._pages[0].is_used_up:
            page = self._pages.popleft()
            if not page.is_under_way:
                self._free.append(page.slots)

    def _make_batch(self, parts: list[tuple[Page, int, int]], num_rows: int, annotations: tuple[bool, bool]) -> Batch:
        priorities = list(chain.from_iterable(page.priorities[start:stop] for page, start, stop in parts))
        versions = list(chain.from_iterable(page.policy_versions[start:stop] for page, start, stop in parts))
        ends = list(chain.from_iterable(page.ends[start:stop] for page, start, stop in parts))
        return Batch(
            captured=tuple(self._capture(*part) for part in parts),
            num_rows=num_rows,
            stream=parts[0][0].stream,
            priorities=np.array(priorities) if annotations[0] else None,
            policy_versions=np.array(versions, np.int64) if annotations[1] else None,
            ends=np.array(ends) if any(ends) else None,
            parts=tuple(parts),
        )

    def _capture(self, page: Page, start: int, stop: int) -> Captured:
        spec = self._batch_spec.with_rows(stop - start)
        columns = zip(spec.tensors, page.slots.tensors, strict=True)
        tensors = {path: tensor[start:stop] for (path, _), tensor in columns}
        rows = page.values[start:stop]
        values = {path: [row[number] for row in rows] for number, (path, _) in enumerate(spec.values)}
        return Captured(spec, tensors, values, {})
