"""Rows that were drawn, on their way to the caller: joined, replaced, split into batches and built."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.client.content.read_content import Content
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.tables.draws.query import Query
from tdserve.messages.content import ADDED_DTYPES, GENERATION_KEY, INDEX_KEY, SLICE_END_KEY
from tdserve.structure.building.build import build
from tdserve.structure.stacks.elements import with_one_value
from tdserve.structure.tensors.independent_views import make_independent_views
from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees.tree import Spec, TensorLeaf

_TRUNCATED = ("next", "truncated")


class LeaseGrant(NamedTuple):
    """What has taken rows on lease.

    Attributes:
        request: The number of the request.
        numbers: Those of the client that made it: a client of another server gives the same number to another request.
    """

    request: int
    numbers: RequestNumbers


class Sampled:
    """Rows of one or several batches, in order.

    Attributes:
        spec: Their structure, with the added keys.
        tensors: Every leaf by path, including added keys.
        values: Non-tensor values by path.
        num_torn: Rows that were overwritten while they were copied.
        grant: The request that took them on lease; None: unknown, or not on lease.
    """

    grant: LeaseGrant | None = None

    def __init__(self, content: Content, query: Query) -> None:
        received = content.columns
        self.tensors = content.leaves  # not copied: the content of a sample has no other reader
        shown = (INDEX_KEY, GENERATION_KEY, *query.added)
        if SLICE_END_KEY in query.added:
            has_flag = _TRUNCATED in self.tensors
            if has_flag:
                self.tensors[_TRUNCATED][received.get_trailing(SLICE_END_KEY)] = True
            if has_flag or SLICE_END_KEY in dict(content.spec.root.entries):
                shown = tuple(name for name in shown if name != SLICE_END_KEY)
        self.spec = _with_added_keys(content.spec, shown)
        self.tensors.update({(name,): received.get_trailing(name) for name in shown})
        self.values = content.values
        self._pad = query.pad
        self._stored = query.stored
        self._fault = content.fault
        self.num_torn = received.num_torn

    @property
    def missing(self) -> torch.Tensor:
        """Returns the positions of rows that were overwritten while they were copied; their content is undefined."""
        generations = self.tensors[(GENERATION_KEY,)].numpy()
        return torch.from_numpy(np.flatnonzero(generations < 0))

    def replace(self, positions: torch.Tensor, rows: Sampled) -> None:
        """Puts other rows at these positions."""
        for path, tensor in self.tensors.items():
            to_indexable(tensor)[positions] = to_indexable(rows.tensors[path])
        for path, values in self.values.items():
            for position, value in zip(positions.tolist(), rows.values[path], strict=True):
                values[position] = value

    def build(self) -> Any:
        """Builds the tensordict of all rows; its leaves are views of one buffer.

        Raises:
            NotSupportedError, RemoteProtocolError: Values of rows on lease cannot be decoded.
        """
        if self._fault is not None:
            raise self._fault
        values = with_one_value(self.values, self.spec, self._stored)
        return build(*pad_ragged(self.spec, self.tensors, values, self._pad))

    def split(self, num_rows: int) -> list[Any]:
        """Builds the tensordicts of batches of ``num_rows`` rows, as views of one buffer."""
        total = self.spec.batch_size[0]
        if total == num_rows:
            return [self.build()]
        spec = self.spec.with_rows(num_rows)
        firsts = range(0, total, num_rows)
        columns = self.tensors.values()
        parts = make_independent_views(lambda: [part for column in columns for part in torch.split(column, num_rows)])
        is_per_row = {path: leaf.per_row for path, leaf in self.spec.values}
        whole = with_one_value(self.values, self.spec, self._stored)
        batches = []
        for number, first in enumerate(firsts):
            values = {
                path: column[first : first + num_rows] if is_per_row[path] else column for path, column in whole.items()
            }
            tensors = dict(zip(self.tensors, parts[number :: len(firsts)], strict=True))
            batches.append(build(*pad_ragged(spec, tensors, values, self._pad)))
        return batches

    def move_rows(self, offset: int) -> Sampled:
        """Returns these rows with a number added to all row numbers: the table is a part of a larger one."""
        moved = copy(self)
        moved.tensors = {**self.tensors, (INDEX_KEY,): self.tensors[(INDEX_KEY,)] + offset}
        return moved

    @classmethod
    def join(cls, parts: Sequence[Sampled], order: torch.Tensor | None) -> Sampled:
        """Joins rows of tables of the same structure. A leaf that only some of the tables have got so far is left out.

        Args:
            parts: At least one. Of several, none keeps what it has.
            order: Position of each row of the result among the rows of all parts; None keeps them as they are.
        """
        if len(parts) == 1:
            return parts[0]
        kept = min(parts, key=lambda part: len(part.spec.leaf_paths))
        kept.spec = _find_common(kept, parts).with_rows(sum(part.spec.batch_size[0] for part in parts))
        faults = [part._fault for part in parts if part._fault is not None]
        kept._fault = faults[0] if faults else None
        kept.num_torn = sum(part.num_torn for part in parts)
        tensors, values = kept.tensors, kept.values
        kept.tensors, kept.values = {}, {}
        for path, _ in kept.spec.tensors:
            joined = torch.cat([tensors[path] if part is kept else part.tensors[path] for part in parts])
            # An index takes other threads even for few rows: on a busy machine they spin for milliseconds.
            kept.tensors[path] = joined if order is None else joined.index_select(0, order)
        for path, leaf in kept.spec.values:
            kept.values[path] = values[path]
            if leaf.per_row:
                found = [value for part in parts for value in (values if part is kept else part.values)[path]]
                kept.values[path] = found if order is None else [found[number] for number in order.tolist()]
        return kept


def _find_common(narrowest: Sampled, parts: Sequence[Sampled]) -> Spec:
    """Returns the structure of the narrowest of some parts, without leaves that another lacks."""
    spec = narrowest.spec
    if all(part._stored.fingerprint == narrowest._stored.fingerprint for part in parts):
        return spec
    common = set(spec.leaf_paths).intersection(*(part.spec.leaf_paths for part in parts))
    return spec if len(common) == len(spec.leaf_paths) else spec.select([p for p in spec.leaf_paths if p in common])


def build_rows(content: Content, stored: Spec, pad: Pad = None) -> Any:
    """Builds the tensordict of rows that were read from a table of this structure, padded."""
    values = with_one_value(content.values, content.spec, stored)
    return (content if values is content.values else replace(content, values=values)).build(pad=pad)


def _with_added_keys(spec: Spec, names: tuple[str, ...]) -> Spec:
    added: Spec | None = spec.memo.get(("sampled", names))
    if added is None:
        columns = tuple((name, TensorLeaf(ADDED_DTYPES.get(name, "int64"), (spec.batch_size[0],))) for name in names)
        # A tensorclass has no fields for the added keys: a sample of one is a plain tensordict.
        root = spec.root._replace(entries=(*spec.root.entries, *columns), tensorclass=None)
        added = spec.memo["sampled", names] = Spec(root)
    return added
