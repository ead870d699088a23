"""Reads of a table's rows by their numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SelectionError, TransferAbortedError
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad, pad_built, select_padding
from tdserve.client.content.read_content import Content
from tdserve.client.datasets.dataset import iter_rows
from tdserve.client.handles.key_paths import NO_DEFAULT, list_paths
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.client_mover import WantedRows
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.tables.change_requests import MAX_MESSAGE_ROWS
from tdserve.client.tables.draws.sampled import build_rows
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.shaped_rows import check_row_index, make_ragged_error, shape_rows
from tdserve.client.tables.table_counts import ask_counts
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY
from tdserve.messages.row_numbers import Rows
from tdserve.messages.selection.selection import parse
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2


class _FoundRows(NamedTuple):
    """Rows that were read.

    Attributes:
        contents: Content of one index after the other.
        chosen: Structure of the table, reduced to what was asked for.
        stored: Structure of the table.
    """

    contents: list[Content]
    chosen: Spec
    stored: Spec

    def build(self, pad: Pad = None) -> Any:
        """Builds the rows, padded as in ``TableHandle.get_at``."""
        if len(self.contents) == 1:
            content = self.contents[0]
            return build_rows(content, self.chosen, select_padding(pad, content.spec, self.stored))
        whole = torch.cat([build_rows(content, self.chosen) for content in self.contents])
        return pad_built(whole, pad, self.stored)


@leave_modes_in_calls  # a caller that iterates over rows is in modes of its own
class RowsByNumber:
    """Live rows of a table, which are read by number. Threads: safe.

    Args:
        table: Which is followed, if it has changed.
    """

    def __init__(self, table: FollowedTable) -> None:
        self._table = table

    def read(self, index: Any, keys: Sequence[Path] = (), *, timeout_s: float | None = None, pad: Pad = None) -> Any:
        """Returns live rows, or these keys of them; see ``TableHandle.read_rows``."""
        check_real("reading rows", ROWS)
        name, client = self._table.name, self._table.client
        check_row_index(index, store=name)
        index, shape = (slice(None) if index is Ellipsis else index), None
        pieces = [index]
        if not isinstance(index, slice):
            try:
                array = np.asarray(to_host(index))
            except ValueError as fault:  # lists of different lengths
                raise SelectionError(selection=f"of table {name!r}", reason=str(fault)) from None
            if array.dtype == np.bool_ and array.ndim != 1:
                raise SelectionError(selection=f"of table {name!r}", reason="a mask has one flag for each row")
            if array.dtype != np.bool_:
                shape = array.shape
                if array.size > MAX_MESSAGE_ROWS:
                    numbers = array.reshape(-1)
                    begins = range(0, array.size, MAX_MESSAGE_ROWS)
                    pieces = [numbers[begin : begin + MAX_MESSAGE_ROWS] for begin in begins]
        found = self._read_pieces(pieces, keys, client.make_deadline(timeout_s)).build(pad)
        return shape_rows(found, shape, store=name, is_array=client.numpy)

    def read_with_generations(self, numbers: Rows, deadline: Deadline | None = None) -> tuple[Any, torch.Tensor]:
        """Returns live rows and their generations; see ``TableHandle.read_with_generations``."""
        check_real("reading rows", ROWS)
        begins = range(0, max(len(numbers), 1), MAX_MESSAGE_ROWS)
        pieces = [numbers[begin : begin + MAX_MESSAGE_ROWS] for begin in begins]
        found = self._read_pieces(pieces, (), self._table.client.make_deadline(None) if deadline is None else deadline)
        generations = torch.cat([content.columns.get_trailing(GENERATION_KEY) for content in found.contents])
        return found.build(), generations

    def read_numbered(
        self, among: slice = slice(None), keys: Sequence[Path] = ()
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Returns live rows, their numbers and their generations; see ``TableHandle.read_numbered``."""
        check_real("reading rows", ROWS)
        found = self._read_pieces([among], keys, self._table.client.make_deadline(None))
        columns = found.contents[0].columns
        return found.build(), columns.get_trailing(INDEX_KEY), columns.get_trailing(GENERATION_KEY)

    def iterate(self) -> Iterator[Any]:
        """Yields the live rows by their numbers, read in blocks."""
        table = self._table
        num_rows = ask_counts(table.client, table.name, table.client.make_deadline(None), kind=table.kind).counts.rows
        return iter_rows(self.read, num_rows, table.spec.nbytes * num_rows, end=table.capacity)

    def _read_pieces(self, indices: Sequence[Any], keys: Sequence[Path], deadline: Deadline) -> _FoundRows:
        """Reads rows by several indices, all under one structure of the table."""

        def read() -> _FoundRows:
            wanted = WantedRows(self._table.name, self._table.stored, tuple(keys), kind=self._table.kind)
            return _FoundRows([self._read(index, wanted, deadline) for index in indices], wanted.chosen, wanted.stored)

        return self._table.follow_and_retry(read, deadline)

    def _read(self, index: Any, wanted: WantedRows, deadline: Deadline) -> Content:
        selection = parse(index, store=wanted.name)

        def attempt(session: Session, request: int, deadline: Deadline) -> Content:
            content = session.movers.reads.read_listed(wanted, selection)
            if content is None:
                asked = control_pb2.ReadRequest(
                    store=wanted.name,
                    selection=selection.to_message(),
                    keys=[content_pb2.Path(parts=path) for path in wanted.keys],
                    fingerprint=wanted.stored.fingerprint,
                    timeout_s=deadline.remaining_s,
                    kind=wanted.kind,
                )
                on_announced = session.movers.reads.make_early_receiver(request, lambda: wanted)
                pending = session.send(request, on_announced=on_announced, read=asked)
                answer = pending.wait(compute_answer_timeout_s(deadline), f"a read of {wanted.name!r}")
                content = session.movers.reads.take_rows(Reply(request, pending, answer, deadline), wanted)
            _check_whole(content, request)
            return content

        return self._table.client.call(attempt, deadline, store=self._table.name)


def get_keys(read: Callable[[Sequence[Path]], Any], key: str | Path | list[Any], default: Any, *, store: str) -> Any:
    """Returns some keys of rows.

    Args:
        read: Reads these keys of the rows, in the form that the caller gets: a tensordict or a dict of arrays.
        key, default: As in ``TableHandle.get_at``.
        store: Name of the table, for errors.

    Raises:
        InvalidRequestError, KeyNotFoundError, SelectionError: As in ``TableHandle.get_at``.
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
        unknown = f"without a row the structure of {'.'.join(path)!r} is unknown"
        reason = f"it selects no rows, and rows of this table differ: {unknown}"
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
