"""The part that all handles of tables share: rows are written, read by number, changed and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    SpecMismatchError,
    StructureChangedError,
    TooLargeError,
)
from tdserve.base.integers import check_integer
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.handles.key_paths import check_path
from tdserve.client.handles.overwriting import overwrite
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.tables.change_requests import (
    change,
    encode_deletion,
    flatten_row_dims,
    to_generations,
    to_row_numbers,
    to_whole_generations,
)
from tdserve.client.tables.conditional_update import check_values, find_generations, write_same
from tdserve.client.tables.destack import destack
from tdserve.client.tables.extend_parts import ExtendPart
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.given_rows import GivenRows, is_plain_batch
from tdserve.client.tables.new_leaves import add_leaves, find_lacking
from tdserve.client.tables.new_table import capture_row
from tdserve.client.tables.retype_table import retype, was_densified
from tdserve.client.tables.row_annotations import RowAnnotations, add_policy_news
from tdserve.client.tables.table_counts import TableCounts, ask_counts
from tdserve.client.tables.writer import ReplayWriter
from tdserve.client.transfers.write import ExpectedRows
from tdserve.messages.content import ADDED_KEYS
from tdserve.messages.row_numbers import Rows
from tdserve.structure.captures.array_dicts import read_rows
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.stacks.elements import restack_by_rows
from tdserve.structure.trees.tree import Path
from tdserve.v1 import content_pb2, control_pb2


@leave_modes_in_calls
class TableHandle(FollowedTable):
    """A table of rows on the server, by name. If the table is deleted and created again for the same rows, the handle
    refers to the new one.

    Threads: safe. Processes: safe, whether the handle is pickled (by address) or forked.

    Attributes:
        name: Name of the store.
        capacity: Rows.
        spec: Structure of one row.
        settings: Sampler, remover and limiter at the time when this handle was made.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self.capacity} at {self._client.address}>"

    @property
    def part_capacity(self) -> int:
        """Rows of each shard: here all, for programs that also meet shared tables."""
        return self.capacity

    def __len__(self) -> int:
        """Returns the number of live rows; costs as much as a small read. ``counts`` sends no request."""
        return self._ask_counts().rows

    def measure_length(self) -> int:
        """Returns the number of rows that are live or being overwritten: of a full ring always its capacity.

        This is the length that buffers in one process have; ``len`` counts what can be read at this moment.
        """
        counts = self._ask_counts()
        return counts.rows + counts.overwritten

    def _ask_counts(self) -> control_pb2.TableCounts:
        done = ask_counts(self._client, self.name, self._client.make_deadline(None), kind=self._kind)
        self._counts.update(done)
        return done.counts

    def counts(self) -> TableCounts:
        """Returns live rows and inserts as of the last answer to this handle, without a request.

        Answers to ``extend``, to changes such as ``clear``, and to ``len`` contain them. A local client that extends
        into claimed rows does not get an answer for each extend.
        """
        return self._counts.newest

    def info(self) -> dict[str, Any]:
        """Returns figures of the table.

        They are num_rows, capacity, inserts, samples, reserved_rows, num_waiting, settings and more. ``inserts`` counts
        the rows that were stored: of an extend of more rows than a ring has, not those whose number is -1.
        """
        return self._client.catalog.describe(self.name).check_kind(self._shown_kind).as_dict()

    def extend(
        self,
        batch: Any,
        *,
        flatten: bool = False,
        priority: Any = None,
        ends: Any = None,
        writer: int = 0,
        policy_version: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Writes rows, which become visible together.

        Args:
            batch: Tensordict of batch size ``[n, *row]``, or one row, of batch size ``row``. It may lack leaves, which
                are written later with ``set_at_``; until then the rows are drawn only by samples with ``require``.
                Keys that samples add, such as ``"index"``, are ignored. Tensors are converted to the dtypes of the
                table where these hold all values of theirs. A dict of arrays or tensors stands for a tensordict, and a
                list of dicts for one of its rows each.
            flatten: True also takes rows in several dimensions, such as ``[workers, time, *row]``. They are stored in
                row-major order. Where the table links rows to trajectories by their order, one ends at the end of each
                line along the last of these dimensions.
            priority: At least 0; one per row, or one for all; None: the highest so far, and at least 1.0.
            ends: Bool, one per row, or one for all: which rows are the last of their trajectory.
            writer: Rows with different numbers are never in one trajectory; 0 is this client's own.
            policy_version: Version of the table's policy that made the rows; one per row, or one for all; None: the
                newest published one when they are stored, 0 before the first.
            timeout_s: Seconds to wait for room; None is the client's default.
            return_early: True returns a future at once; ``batch`` must not change before it is done. Up to 64 extends
                may be under way.

        Returns:
            Row numbers, int64 ``[n]``, or a future of them; ``[1]`` for one row, and with ``flatten`` in the dimensions
            of the rows. Of more rows than a ring has that makes no writer wait, the newest are stored, and the number
            of the others is -1.

        Raises:
            SpecMismatchError: The batch does not fit the rows. Nothing was written.
            InvalidRequestError: A priority is negative or not finite, or a version is above the newest; or there are
                more rows than the ``max_size`` of the table's :class:`~tdserve.Queue`. Nothing was written.
            TooLargeError: The batch has more rows than the table, whose writers wait, or which does not remove the
                oldest rows. Nothing was written.
            CapacityError: The disk, or the space for values, is full. Nothing was written, but a full table may have
                removed rows to make room, and they stay removed.
            WrongStateError: The table was closed. Nothing was written.
            DeadlineExceededError: There was no room in time; the error names what it waited for. Or the answer did not
                come in time, and it is unknown whether the rows were stored: the same call, made again, may store them
                twice, and a full table may have removed rows to make room.
        """
        writer = check_integer("writer", writer, 0, maximum=2**64 - 1)
        annotations, stored = RowAnnotations(priority, ends, writer, policy_version), self._stored
        deadline = self._client.make_deadline(timeout_s)
        try:
            return self._extend_rows(batch, annotations, flatten, deadline, return_early)
        except TooLargeError:
            if not self._has_followed(stored, deadline):
                raise
        return self._extend_rows(batch, annotations, flatten, deadline, return_early)  # for a smaller ring

    def _extend_rows(
        self, batch: Any, annotations: RowAnnotations, flatten: bool, deadline: Deadline, return_early: bool
    ) -> Any:
        if isinstance(batch, (dict, list)):
            batch = read_rows(batch, self.spec, store=self.name)
        if isinstance(batch, list) and not batch:  # no rows, in no structure
            index = self._extend((), (), annotations, deadline, return_early)
            return self._show_numbers(index) if self._client.numpy else index
        if not flatten and is_plain_batch(batch, self._num_dims, self.capacity):
            captured, keys = self._capture_batch(batch, deadline)
            index = self._extend((captured,), keys, annotations, deadline, return_early)
            return self._show_numbers(index) if self._client.numpy else index
        given = GivenRows.read(batch, annotations, self.spec, self.settings.sampler, flatten=flatten, store=self.name)
        if given.num_rows > self.capacity:
            self._follow_changed(deadline)  # perhaps with room for all of them, or with another limiter
            given = given.keep_newest(self.capacity) if self.settings.overwrites_oldest else given
        captured, keys = self._capture_batch(given.batch, deadline)
        is_cut = given.num_cut > 0
        index = given.restore(self._extend((captured,), keys, given.annotations, deadline, return_early, is_cut=is_cut))
        return self._show_numbers(index) if self._client.numpy else index

    def _show_numbers(self, index: Any) -> Any:
        """Returns row numbers, or a future of them, in the form of the client."""
        show = self._client.hand_over
        return show(index) if isinstance(index, torch.Tensor) else index.convert(show)

    def check_rows(self, batch: Any, priority: Any = None) -> None:
        """Raises what ``extend`` would raise for rows, or priorities, that do not fit. No rows are written."""
        annotations = RowAnnotations(priority)
        given = GivenRows.read(batch, annotations, self.spec, self.settings.sampler, store=self.name)
        captured, _ = self._capture_batch(given.batch, self._client.make_deadline(None))
        num_rows = captured.spec.batch_size[0]
        annotations.add_to(control_pb2.ExtendRequest(store=self.name, num_rows=num_rows), self.settings)

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Writes rows that a writer has captured, all together; result and errors as in ``extend``."""
        deadline = self._client.make_deadline(timeout_s)
        keys = self._check_fits(captured[0].spec)
        numbers: torch.Tensor = self._extend(captured, keys, annotations, deadline, return_early=False)
        return numbers

    def _extend(
        self,
        captured: Sequence[Captured],
        keys: tuple[Path, ...],
        annotations: RowAnnotations,
        deadline: Deadline,
        return_early: bool,
        *,
        is_cut: bool = False,
    ) -> Any:
        num_rows = sum(each.spec.batch_size[0] for each in captured)
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64)
            return AwaitableFuture.make_done(empty) if return_early else empty
        tried = self._coalescer.write_claimed(captured) if not keys and annotations.is_plain else None
        if isinstance(tried, torch.Tensor):
            return AwaitableFuture.make_done(tried) if return_early else tried
        request = control_pb2.ExtendRequest(store=self.name, num_rows=num_rows, kind=self._kind)
        request.keys.extend(content_pb2.Path(parts=path) for path in keys)
        annotations.add_to(request, self.settings)
        add_policy_news(request, self._client, self.settings.policy)
        number = None if tried is None else tried.request
        part = ExtendPart.from_request(captured, request, deadline, number=number)
        if return_early:
            self._coalescer.submit(part)
            return part.future
        if number is None and self._coalescer.is_waiting:  # these were first
            return self._coalescer.submit_and_wait(part)
        capacity = self.capacity
        while True:
            stored = self._stored
            try:
                index = self._coalescer.send(part)
                break
            except SpecMismatchError:
                if not self._has_followed(stored, deadline):
                    raise
                if is_cut and self.capacity != capacity:  # the table may have room now for what was cut off
                    raise
                part = part._replace(number=None)  # nothing was stored under the first number
        self._is_in_use = True
        return index

    def add_leaves(self, like: Any, *, timeout_s: float | None = None) -> None:
        """Adds the leaves to the table's rows that ``like`` has and they lack; all clients see them from then on.

        Rows that lack such a leaf have zeros there: those that were written before, and those of writers that do not
        know it. Of a non-tensor leaf they have None. So they count as complete, unlike rows that lack a leaf with which
        the table was created. Other leaves stay as they are; nothing happens if rows lack none.

        Args:
            like: One row; its content does not matter, and it may lack leaves that rows have.

        Raises:
            SpecMismatchError: The batch size is not that of a row, or a leaf is below another one. Nothing was changed.
            InvalidSpecError: A key is one that samples add. Nothing was changed.
            NotSupportedError: The rows are of a class, which has no such field. Nothing was changed.
            CapacityError: There is no room for the leaves. Nothing was changed.
        """
        row, deadline = capture_row(self._client, self.name, like).spec, self._client.make_deadline(timeout_s)
        while find_lacking(self.spec, row):
            stored = self._stored
            try:
                add_leaves(self._client, self.name, self.spec, row, deadline, kind=self._kind)
            except StructureChangedError:
                if not self._has_followed(stored, deadline):
                    raise
            else:
                self._follow_changed(deadline)

    def writer(self, batch: int = 64, **options: Any) -> ReplayWriter:
        """Returns a writer of single rows, which sends them in batches; arguments as in ``ReplayWriter``."""
        return ReplayWriter(self, batch=batch, **options)

    def set_at_(
        self,
        key: str | Path,
        value: Any,
        index: Any,
        *,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Writes a leaf or nested part of live rows, in one write; readers see each row either before or after it.

        Args:
            key: Key of the leaf, which may not have been written yet.
            value: Tensor ``[n, *leaf]``, broadcast as by ``leaf[index] = value``; or values of a non-tensor leaf. It
                may have as many dimensions for the rows as ``index``.
            index: Row numbers, as returned by ``extend``. A sampled batch stands for its rows, and nothing is written
                if one of them was overwritten since; bare numbers mean whatever rows have them now.
            return_early: True returns a future at once. ``value`` must not change before it is done, and several writes
                under way may finish in any order.

        Returns:
            None, or a future of it.

        Raises:
            SelectionError: A row is not live, or was overwritten since the batch was sampled. Nothing was written.
            KeyNotFoundError, SpecMismatchError: The key or the value does not fit. Nothing was written.
            InvalidRequestError: The table orders its rows by this key. Nothing was written.
        """
        path = check_path(key)
        rows, value = to_row_numbers(index, table=self.name), flatten_row_dims(value, index)
        expected = ExpectedRows(to_generations(index, None, len(rows)).tobytes())
        deadline = self._client.make_deadline(timeout_s)

        def write() -> None:
            overwrite(
                self._client,
                self.name,
                self._stored,
                rows,
                value,
                at=path,
                is_exact=False,
                expected=expected,
                kind=self._kind,
                deadline=deadline,
            )

        return self._client.perform(partial(self.follow_and_retry, write, deadline), deadline, return_early)

    def update_if_present(
        self,
        index: Any,
        values: Any,
        *,
        generation: Any = None,
        is_unchanged: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Writes leaves of those rows that are still the same, in one write, and skips the others.

        A row stays the same row while leaves of it are written, and becomes another one when its place is used again.

        Args:
            index: A sampled batch, or row numbers. If a row occurs twice, the last one counts.
            values: Leaves by key, a dict or a tensordict: ``[n, *leaf]``.
            generation: Generation of each row, if ``index`` is not a batch.
            is_unchanged: True also skips rows of which a leaf was written since.

        Returns:
            Which rows were written, bool ``[n]``.

        Raises:
            KeyNotFoundError, SpecMismatchError: A key or a value does not fit. Nothing was written.
            InvalidRequestError: The table orders its rows by a key, or there are no generations. Nothing was written.
        """
        rows, generations = to_row_numbers(index), to_whole_generations(index, generation)
        check_values(values, len(rows), self.spec, store=self.name)
        deadline = self._client.make_deadline(timeout_s)

        def overwrite_rows(rows: Rows, values: Any, expected: ExpectedRows) -> None:
            def write() -> None:
                overwrite(
                    self._client,
                    self.name,
                    self._stored,
                    rows,
                    values,
                    at=(),
                    is_exact=False,
                    expected=expected,
                    kind=self._kind,
                    deadline=deadline,
                )

            self.follow_and_retry(write, deadline)

        is_same = write_same(
            rows,
            generations,
            values,
            is_unchanged=is_unchanged,
            overwrite=overwrite_rows,
            read_generations=partial(self._read_generations, deadline=deadline),
        )
        return self._client.hand_over(torch.from_numpy(is_same))

    def find_generations(self, index: Any) -> torch.Tensor:
        """Returns the generation of each row, -1 for those that are not live; int64 ``[n]``."""
        return torch.from_numpy(self._read_generations(to_row_numbers(index), self._client.make_deadline(None)))

    def _read_generations(self, rows: Rows, deadline: Deadline) -> NDArray[np.int64]:
        return find_generations(lambda part: self.read_with_generations(part, deadline)[1].numpy(), rows)

    def delete(self, index: Any, *, generation: Any = None, timeout_s: float | None = None) -> int:
        """Deletes rows, all of them or none; returns their number.

        Args:
            index: A sampled batch, or row numbers. A batch stands for exactly its rows: those that were overwritten or
                deleted since are skipped, and do not count. Bare numbers mean whatever rows have them now. A row that
                occurs twice counts once.
            generation: Generation of each row, if ``index`` is not a batch: the numbers then stand for exactly these
                rows, as in a batch.

        Raises:
            SelectionError: A row is out of range; or, of bare numbers, not live. Nothing was changed.
            InvalidRequestError: The number of generations differs from that of the rows. Nothing was changed.
        """
        return self._change(timeout_s, **encode_deletion(index, generation)).num_rows

    def clear(self, *, reset_counts: bool = False, timeout_s: float | None = None) -> int:
        """Deletes all rows and resets the limiter; returns how many rows there were.

        With very many rows this takes a while, during which other clients see fewer and fewer. Rows that are written
        during that time stay.

        Args:
            reset_counts: Also resets ``inserts``, as shown by ``info`` and ``counts``, to 0.
        """
        return self._change(timeout_s, clear=True, resets_counts=reset_counts).num_rows

    def _change(self, timeout_s: float | None, **body: Any) -> control_pb2.Done:
        done = change(self._client, self.name, self._client.make_deadline(timeout_s), **self._meant, **body)
        self._counts.update(done)
        return done

    def close(self, *, timeout_s: float | None = None) -> None:
        """Closes the table for writers: readers get what is left, then EndOfStreamError.

        For ``take`` that is when all rows were acknowledged, for ``sample`` when fewer are left than it draws. Rows
        that lack leaves, or are on lease to the same consumer, are waited for. Calls that wait end too.
        """
        self._change(timeout_s, close=True)

    def set_limiter(self, limiter: Any, *, timeout_s: float | None = None) -> None:
        """Replaces the limiter; it applies at once, also to calls that wait already.

        Raises:
            InvalidRequestError: It could never admit anything. Nothing was changed.
        """
        settings = self.settings.with_limiter(limiter)
        settings.check(self.capacity)
        self._change(timeout_s, limiter=settings.to_json())
        self.settings = settings

    def set_sampler(self, sampler: Any, *, timeout_s: float | None = None) -> None:
        """Changes parameters of the sampler, such as the ``beta`` of ``Prioritized``; later samples are drawn by it.

        Batches that were prefetched before keep the weights that they have.

        Raises:
            InvalidRequestError: It is another sampler, or has another parameter that cannot change, which the error
                names. Nothing was changed.
        """
        settings = self.settings.with_sampler(sampler)
        self._change(timeout_s, sampler=settings.to_json())
        self.settings = settings

    def _capture_batch(self, batch: Any, deadline: Deadline) -> tuple[Captured, tuple[Path, ...]]:
        """Captures a batch; also returns the keys of its leaves, none if it has all of them.

        The first rows decide whether a table accepts rows that differ in size: nested tensors do, whatever their
        lengths.
        """
        try:
            found = self._capture_fitting(batch)
            if self._is_in_use or not was_densified(batch, found[0].spec):
                return found
        except SpecMismatchError:
            if (columns := destack(batch, self.spec)) is not None:
                return self._capture_fitting(columns)
            if self._follow_changed(deadline):
                return self._capture_fitting(batch)
            if self._is_in_use:
                raise
        if (now := retype(self._client, self.name, self.spec, batch, deadline, kind=self._shown_kind)) is not None:
            self._follow(now)
        return self._capture_fitting(batch)

    def _capture_fitting(self, batch: Any) -> tuple[Captured, tuple[Path, ...]]:
        captured = capture(
            batch, store=self.name, like=self._stored, allow_pickle=self._client.allow_pickle, ignores=ADDED_KEYS
        )
        is_deep = len(captured.spec.batch_size) == self._num_dims
        if not is_deep and (rows := restack_by_rows(batch)) is not batch:
            return self._capture_fitting(rows)
        return captured, self._check_fits(captured.spec)
