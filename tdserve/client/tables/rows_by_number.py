"""Reads of a table's rows by their numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SelectionError, TransferAbortedError
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad, pad_built, select_padding
from tdserve.client.content.read_content import Content
from tdserve.client.datasets.dataset import iter_rows, read_into_shared_memory
from tdserve.client.handles.key_paths import NO_DEFAULT, list_paths
from tdserve.client.session.by_address import ByAddress
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.client_mover import WantedRows
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.tables.change_requests import MAX_MESSAGE_ROWS, ask_sequences, to_row_numbers
from tdserve.client.tables.sampling import build_rows
from tdserve.client.tables.shaped_rows import check_row_index, make_ragged_error, shape_rows
from tdserve.client.tables.table_counts import ask_counts
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY
from tdserve.messages.row_numbers import Rows
from tdserve.messages.selection.selection import parse
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2

T = TypeVar("T")


class _FoundRows(NamedTuple):
    """Rows that were read.

    Attributes:
        contents: Of one index after the other.
        chosen: Structure of the table, reduced to what was asked for.
        stored: Structure of the table.
    """

    contents: list[Content]
    chosen: Spec
    stored: Spec

    def build(self, pad: Pad = None) -> Any:
        """Builds the rows, padded as in ``RowsByNumber.get_at``."""
        if len(self.contents) == 1:
            content = self.contents[0]
            return build_rows(content, self.chosen, select_padding(pad, content.spec, self.stored))
        whole = torch.cat([build_rows(content, self.chosen) for content in self.contents])
        return pad_built(whole, pad, self.stored)


@leave_modes_in_calls
class RowsByNumber(ByAddress):
    """The part of a table's handle that reads live rows by number; attributes as in ``TableHandle``."""

    name: str
    capacity: int
    spec: Spec
    _stored: Spec
    _kind: ClassVar[control_pb2.StoreKind]
    """What each request says of the store that it means: another one may have the name by now."""

    def __getitem__(self, index: Any) -> Any:
        """Reads live rows by number, which does not count as sampling.

        An integer or an array of integers means row numbers, as in the result of ``extend`` and in ``"index"``;
        negative ones count from the live row with the highest number, which is -1. A slice or a mask stands for the
        numbers from 0 to the last live row, of which it selects those that are live: after rows have left the table,
        ``table[:5]`` may have fewer than five.

        Raises:
            SelectionError: A row is not live, or out of range.
        """
        return self._client.hand_over(self.read_rows(index))

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
            return self._client.hand_over(self.read_rows(index, paths, timeout_s=timeout_s, pad=pad))

        return get_keys(read, key, default, store=self.name)

    def get_with_generations(self, index: Any) -> tuple[Any, Any]:
        """Reads live rows by number, as ``table[index]`` does, and the generation of each: to write them later if they
        are still the same (:meth:`update_if_present`). A sample has them in any case.

        Args:
            index: Row numbers, or one.

        Raises:
            SelectionError: A row is not live, or out of range.
        """
        rows, generations = self.read_with_generations(to_row_numbers(index))
        show, is_one = self._client.hand_over, np.ndim(index) == 0
        return show(rows[0] if is_one else rows), show(generations[0] if is_one else generations)

    def read_with_generations(self, numbers: Rows, deadline: Deadline | None = None) -> tuple[Any, torch.Tensor]:
        """Returns what ``get_with_generations`` does, always as a tensordict and a tensor.

        Args:
            deadline: Of a call of which this is a step; None: the client's default timeout begins now.
        """
        check_real("reading rows", ROWS)
        begins = range(0, max(len(numbers), 1), MAX_MESSAGE_ROWS)
        pieces = [numbers[begin : begin + MAX_MESSAGE_ROWS] for begin in begins]
        found = self._read_pieces(pieces, (), self._client.make_deadline(None) if deadline is None else deadline)
        generations = torch.cat([content.columns.get_trailing(GENERATION_KEY) for content in found.contents])
        return found.build(), generations

    def read_numbered(
        self, among: slice = slice(None), keys: Sequence[Path] = ()
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Returns live rows, or these keys of them, as ``table[among]`` does, always as a tensordict, their numbers and
        their generations."""
        check_real("reading rows", ROWS)
        found = self._read_pieces([among], keys, self._client.make_deadline(None))
        columns = found.contents[0].columns
        return found.build(), columns.get_trailing(INDEX_KEY), columns.get_trailing(GENERATION_KEY)

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
        check_real("reading rows", ROWS)
        check_row_index(index, store=self.name)
        index, shape = (slice(None) if index is Ellipsis else index), None
        pieces = [index]
        if not isinstance(index, slice):
            try:
                array = np.asarray(to_host(index))
            except ValueError as fault:  # lists of different lengths
                raise SelectionError(selection=f"of table {self.name!r}", reason=str(fault)) from None
            if array.dtype == np.bool_ and array.ndim != 1:
                raise SelectionError(selection=f"of table {self.name!r}", reason="a mask has one flag for each row")
            if array.dtype != np.bool_:
                shape = array.shape
                if array.size > MAX_MESSAGE_ROWS:
                    numbers = array.reshape(-1)
                    begins = range(0, array.size, MAX_MESSAGE_ROWS)
                    pieces = [numbers[begin : begin + MAX_MESSAGE_ROWS] for begin in begins]
        found = self._read_pieces(pieces, keys, self._client.make_deadline(timeout_s)).build(pad)
        return shape_rows(found, shape, store=self.name, is_array=self._client.numpy)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads a whole batch in one call, as a ``DataLoader`` does: ``table[indices]``.

        In a worker of a ``DataLoader`` it is in shared memory, from where the main process takes it without a copy.
        """
        read_into_shared_memory(self._client)
        return self.read_rows(list(indices))

    def __iter__(self) -> Iterator[Any]:
        """Yields the live rows by their numbers, read in blocks. Those that come or leave meanwhile may be left out."""
        deadline = self._client.make_deadline(None)
        num_rows = ask_counts(self._client, self.name, deadline, kind=self._kind).counts.rows
        rows = iter_rows(self.read_rows, num_rows, self.spec.nbytes * num_rows, end=self.capacity)
        return map(self._client.hand_over, rows)

    def _read_pieces(self, indices: Sequence[Any], keys: Sequence[Path], deadline: Deadline) -> _FoundRows:
        """Reads rows by several indices, all under one structure of the table."""

        def read() -> _FoundRows:
            wanted = WantedRows(self.name, self._stored, tuple(keys), kind=self._kind)
            return _FoundRows([self._read(index, wanted, deadline) for index in indices], wanted.chosen, wanted.stored)

        return self.follow_and_retry(read, deadline)

    def _read(self, index: Any, wanted: WantedRows, deadline: Deadline) -> Content:
        selection = parse(index, store=self.name)

        def attempt(session: Session, request: int, deadline: Deadline) -> Content:
            content = session.mover.read_listed(wanted, selection)
            if content is None:
                asked = control_pb2.ReadRequest(
                    store=self.name,
                    selection=selection.to_message(),
                    keys=[content_pb2.Path(parts=path) for path in wanted.keys],
                    fingerprint=wanted.stored.fingerprint,
                    timeout_s=deadline.remaining_s,
                    kind=wanted.kind,
                )
                on_announced = session.mover.make_early_receiver(request, lambda: wanted)
                pending = session.send(request, on_announced=on_announced, read=asked)
                answer = pending.wait(compute_answer_timeout_s(deadline), f"a read of {self.name!r}")
                content = session.mover.take_rows(Reply(request, pending, answer, deadline), wanted)
            _check_whole(content, request)
            return content

        return self._client.call(attempt, deadline)

    def follow_and_retry(self, act: Callable[[], T], deadline: Deadline) -> T:
        """Runs ``act``, once more if the table was recreated in between."""
        raise NotImplementedError


def get_keys(read: Callable[[Sequence[Path]], Any], key: str | Path | list[Any], default: Any, *, store: str) -> Any:
    """Returns some keys of rows.

    Args:
        read: Reads these keys of the rows, in the form that the caller gets: a tensordict or a dict of arrays.
        key, default: As in ``RowsByNumber.get_at``.
        store: Name of the table, for errors.

    Raises:
        InvalidRequestError, KeyNotFoundError, SelectionError: As in ``RowsByNumber.get_at``.
    """
    if isinstance(key, list) and not key:
        raise InvalidRequestError(argument="key", reason="[]: it names nothing to read")
    paths = list_paths(key, argument="key")
    try:
        found = read(paths)
        return found if isinstance(key, list) else _get_entry(found, paths[0], store)
    except KeyNotFoundError:
        if default is NO_DEFAULT:
            raise
        return default


def _get_entry(found: Any, path: Path, store: str) -> Any:
    if not len(found.keys()):
        reason = f"it selects no rows, and of rows that differ in structure only they know what {'.'.join(path)!r} is"
        raise SelectionError(selection=f"of table {store!r}", reason=reason)
    if isinstance(found, dict):
        return reduce(operator.getitem, path, found)
    try:
        return get_entry(found, path)
    except RuntimeError:  # of a lazy stack, whose rows differ
        raise make_ragged_error(path, len(found.batch_size), store) from None


def _check_whole(content: Content, request: int) -> None:
    if content.columns.num_torn:
        raise TransferAbortedError(transfer=request, reason="rows were written while they were read")
