"""What all handles of tables share: rows are written, read by number, changed and deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StructureChangedError
from tdserve.base.integers import check_integer
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.datasets.dataset import read_into_shared_memory
from tdserve.client.handles.key_paths import NO_DEFAULT, check_path
from tdserve.client.handles.overwriting import overwrite
from tdserve.client.session.by_address import ByAddress
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.change_requests import ask_sequences, change, encode_deletion
from tdserve.client.tables.conditional_update import check_values, find_generations, write_same
from tdserve.client.tables.draws.draw_arguments import NO_CONDITIONS, Conditions
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.row_takes import RowTakes
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.new_leaves import add_leaves, find_lacking
from tdserve.client.tables.new_table import capture_row
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.row_arguments import flatten_row_dims, to_generations, to_row_numbers, to_whole_generations
from tdserve.client.tables.row_draws import RowDraws
from tdserve.client.tables.row_extends import RowExtends
from tdserve.client.tables.rows_by_number import RowsByNumber, get_keys
from tdserve.client.tables.table_counts import TableCounts, ask_counts
from tdserve.client.tables.table_policy import report_policy
from tdserve.client.tables.writers.writer import ReplayWriter
from tdserve.client.transfers.write import ExpectedRows
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import control_pb2

T = TypeVar("T")


@leave_modes_in_calls
class TableHandle(ByAddress):
    """A table of rows on the server, by name. If the table is deleted and created again for the same rows, the handle
    refers to the new one.

    Threads: safe. Processes: safe, whether the handle is pickled (by address) or forked.

    Attributes:
        name: Name of the store.
        capacity: Rows.
        spec: Structure of one row.
        settings: Sampler, remover and limiter at the time when this handle was made.
        is_part: Whether it is a part of a shared table, whose row numbers depend on the capacity of each part: then it
            does not follow a table of another capacity.
    """

    _kind: ClassVar[control_pb2.StoreKind]
    """Kind of store that each request names, so that the server refuses it if the name has another kind by now."""

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._client = client
        self.name = description.name
        self._table = FollowedTable(client, description, self._kind)
        self._extends = RowExtends(self._table)
        self._rows = RowsByNumber(self._table)
        self._draws = RowDraws(self._table)
        self._takes: RowTakes = self._draws

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self.capacity} at {self._client.address}>"

    def _make_deadline(self, timeout_s: float | None) -> Deadline:
        return self._client.make_deadline(timeout_s)

    @property
    def capacity(self) -> int:
        """See the class."""
        return self._table.capacity

    @property
    def spec(self) -> Spec:
        """See the class."""
        return self._table.spec

    @property
    def settings(self) -> Settings:
        """See the class."""
        return self._table.settings

    @property
    def is_part(self) -> bool:
        """See the class."""
        return self._table.is_part

    @is_part.setter
    def is_part(self, is_part: bool) -> None:
        self._table.is_part = is_part

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
        self._table.counts.update(done)
        return done.counts

    def counts(self) -> TableCounts:
        """Returns live rows and inserts as of the last answer to this handle, without a request.

        Answers to ``extend``, to changes such as ``clear``, and to ``len`` contain them. A local client that extends
        into claimed rows does not get an answer for each extend.
        """
        return self._table.counts.newest

    def info(self) -> dict[str, Any]:
        """Returns figures of the table.

        They are num_rows, capacity, inserts, samples, reserved_rows, num_waiting, settings and more. ``inserts`` counts
        the rows that were stored: of an extend of more rows than a ring has, not those whose number is -1.
        """
        report_policy(self._client, self.name, self.settings.policy, kind=self._table.kind)
        return self._client.catalog.describe(self.name).check_kind(self._table.shown_kind).as_dict()

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
        annotations = RowAnnotations(priority, ends, writer, policy_version)
        deadline = self._client.make_deadline(timeout_s)
        return self._extends.extend(batch, annotations, deadline, flatten=flatten, return_early=return_early)

    def check_rows(self, batch: Any, priority: Any = None) -> None:
        """Raises what ``extend`` would raise for rows, or priorities, that do not fit. No rows are written."""
        self._extends.check(batch, priority)

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Writes rows that a writer has captured, all together; result and errors as in ``extend``."""
        return self._extends.extend_captured(captured, annotations, self._client.make_deadline(timeout_s))

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
            stored = self._table.stored
            try:
                add_leaves(self._client, self.name, self.spec, row, deadline, kind=self._kind)
            except StructureChangedError:
                if not self._table.has_followed(stored, deadline):
                    raise
            else:
                self._table.follow_changed(deadline)

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
                self._table.stored,
                rows,
                value,
                at=path,
                is_exact=False,
                expected=expected,
                kind=self._kind,
                deadline=deadline,
            )

        return self._client.perform(partial(self._table.follow_and_retry, write, deadline), deadline, return_early)

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
                    self._table.stored,
                    rows,
                    values,
                    at=(),
                    is_exact=False,
                    expected=expected,
                    kind=self._kind,
                    deadline=deadline,
                )

            self._table.follow_and_retry(write, deadline)

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
        return find_generations(lambda part: self._rows.read_with_generations(part, deadline)[1].numpy(), rows)

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
        done = change(self._client, self.name, self._client.make_deadline(timeout_s), **self._table.meant, **body)
        self._table.counts.update(done)
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
        self._table.settings = settings

    def set_sampler(self, sampler: Any, *, timeout_s: float | None = None) -> None:
        """Changes parameters of the sampler, such as the ``beta`` of ``Prioritized``; later samples are drawn by it.

        Batches that were prefetched before keep the weights that they have.

        Raises:
            InvalidRequestError: It is another sampler, or has another parameter that cannot change, which the error
                names. Nothing was changed.
        """
        settings = self.settings.with_sampler(sampler)
        self._change(timeout_s, sampler=settings.to_json())
        self._table.settings = settings

    def __getitem__(self, index: Any) -> Any:
        """Reads live rows by number, which does not count as sampling.

        An integer or an array of integers means row numbers, as in the result of ``extend`` and in ``"index"``;
        negative ones count from the live row with the highest number, which is -1. A slice or a mask stands for the
        numbers from 0 to the last live row, of which it selects those that are live: after rows have left the table,
        ``table[:5]`` may have fewer than five.

        Raises:
            SelectionError: A row is not live, or out of range.
        """
        return self._client.hand_over(self._rows.read(index))

    def get_at(
        self,
        key: str | Path | list[Any],
        index: Any,
        default: Any = NO_DEFAULT,
        *,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads some keys of live rows; only these are sent.

        Args:
            key: Key of a leaf or of a nested tensordict, or a list of keys: then a tensordict of these, all as of one
                moment.
            index: As in ``table[index]``.
            default: Returned if the rows have no such key; without it that is an error.
            pad: Pads ragged tensors to the longest with this number (or numbers by key; keys of the table that were not
                asked for are ignored), as ``sample`` does. With a list of keys the result has masks, too, under
                ``("masks", *key)``. None leaves tensors ragged.
            timeout_s: Seconds to wait for the answer; None is the client's default.

        Raises:
            InvalidRequestError: The list is empty, or ``index`` has several dimensions and the rows differ in size or
                structure, without ``pad``.
            KeyNotFoundError: The rows have no such key.
            SelectionError: A row is not live, or out of range; or one key was asked for, and ``index`` selects none of
                rows that differ in structure.
        """

        def read(paths: Sequence[Path]) -> Any:
            return self._client.hand_over(self._rows.read(index, paths, timeout_s=timeout_s, pad=pad))

        return get_keys(read, key, default, store=self.name)

    def get_with_generations(self, index: Any) -> tuple[Any, Any]:
        """Reads live rows by number, as ``table[index]`` does, and the generation of each: to write them later if they
        are still the same (:meth:`update_if_present`). A sample has them in any case.

        Args:
            index: Row numbers, or one.

        Raises:
            SelectionError: A row is not live, or out of range.
        """
        rows, generations = self._rows.read_with_generations(to_row_numbers(index))
        show, is_one = self._client.hand_over, np.ndim(index) == 0
        return show(rows[0] if is_one else rows), show(generations[0] if is_one else generations)

    def read_with_generations(self, numbers: Rows, deadline: Deadline | None = None) -> tuple[Any, torch.Tensor]:
        """Returns what ``get_with_generations`` does, always as a tensordict and a tensor.

        Args:
            deadline: Deadline of a call of which this is a step; None: the client's default timeout begins now.
        """
        return self._rows.read_with_generations(numbers, deadline)

    def read_numbered(
        self, among: slice = slice(None), keys: Sequence[Path] = ()
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Returns live rows, or these keys of them, as ``table[among]`` does, always as a tensordict, their numbers and
        their generations."""
        return self._rows.read_numbered(among, keys)

    def find_sequences(self, numbers: Rows) -> Rows:
        """Returns for each row twice its place in the order of commits, and 1 more unless it continues the row with the
        number before its own (row 0 the last one).

        It does if that row was the last one of its writer, a client, when it came, and is still the same row. After a
        restart of the server, the next row of each writer continues none. Of rows that are not live nothing is defined.

        Raises:
            SelectionError: A row is out of range.
        """
        return ask_sequences(self._client, self.name, numbers, self._client.make_deadline(None), kind=self._kind)

    def read_rows(
        self, index: Any, keys: Sequence[Path] = (), *, timeout_s: float | None = None, pad: Pad = None
    ) -> Any:
        """Returns live rows, or these keys of them, as ``table[index]`` does, always as a tensordict."""
        return self._rows.read(index, keys, timeout_s=timeout_s, pad=pad)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads a whole batch in one call, as a ``DataLoader`` does: ``table[indices]``.

        In a worker of a ``DataLoader`` it is in shared memory, from where the main process takes it without a copy.
        """
        read_into_shared_memory(self._client)
        return self._rows.read(list(indices))

    def __iter__(self) -> Iterator[Any]:
        """Yields the live rows by their numbers, read in blocks. Those that come or leave meanwhile may be left out."""
        return map(self._client.hand_over, self._rows.iterate())

    def make_query(self, conditions: Conditions = NO_CONDITIONS, **options: Any) -> Query:
        """Makes the query of a sample, and checks it as far as the client can; see ``RowDraws.make_query``."""
        return self._draws.make_query(conditions, **options)

    def check_key(self, path: Path, deadline: Deadline) -> None:
        """Raises KeyNotFoundError if rows have no such key, not even one that came later."""
        self._table.check_key(path, deadline)

    def follow_and_retry(self, act: Callable[[], T], deadline: Deadline, *, uses_rows: bool = True) -> T:
        """Runs ``act``, again if the table has got leaves or was recreated in between; see
        ``FollowedTable.follow_and_retry``."""
        return self._table.follow_and_retry(act, deadline, uses_rows=uses_rows)
