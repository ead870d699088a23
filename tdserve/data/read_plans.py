"""Reads of tensordict stores, planned once per expression and carried out as of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.content import ReadStatus, decode_paths, make_status_column, read_layout, select_spec
from tdserve.messages.layout import Layout
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.messages.selection.torch_selection import to_torch_index
from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees.tree import Path, Spec
from tdserve.transport.sources_sinks import IndexedSource, RowBuffers, Trailer
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

Asked = control_pb2.ReadRequest | worker_pb2.SendSelection

MAX_KEPT_PLANS = 256
MAX_KEPT_BYTES = 512
"""Longest expression whose plan is kept; longer ones, such as ten thousand positions, hardly recur."""

MAX_KEPT_POSITIONS = 1024
"""Rows and elements that a kept plan may list: a slice is short and may select a million of them."""


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The plan of an index expression and keys for a store.

    Attributes:
        spec: Structure of the selected content.
        layout: Its layout.
        index: Index into any leaf; ``()`` takes all of it.
        watched: The generations that show a change: the store's own for a whole read, otherwise those of the rows, with
            repetitions if the expression is a list of rows.
        elements: Positions in the flattened batch, for the values; None for all.
    """

    spec: Spec
    layout: Layout
    index: tuple[Any, ...]
    watched: slice | NDArray[np.int64]
    elements: NDArray[np.int64] | None

    @property
    def num_positions(self) -> int:
        """Number of rows and elements that this plan lists one by one."""
        listed = (self.watched, self.elements, *self.index)
        return sum(len(part) for part in listed if part is not None and hasattr(part, "__len__"))

    @cached_property
    def rows(self) -> NDArray[np.int64] | None:
        """The rows one by one, if the expression is only a list of rows."""
        only = self.index[0] if len(self.index) == 1 else None
        is_list = isinstance(only, torch.Tensor) and only.dtype is torch.int64 and only.ndim == 1
        return only.numpy() if is_list and only is not None else None

    def make_source(self, store: MappedStore, trailer: Trailer) -> IndexedSource | RowBuffers:
        """Returns the selected content of the store's leaves."""
        if self.rows is not None:
            return RowBuffers(self.layout, store.get_tables(self.layout), self.rows, trailer)

        def get_leaf(slot: int) -> Any:
            leaf = store.leaves[self.layout.slots[slot].path]
            return to_indexable(leaf)[self.index] if self.index else leaf

        return IndexedSource(self.layout, get_leaf, trailer)

    def compare_rows(self, store: MappedStore) -> None:
        """Compares the selected rows as ``MappedStore.compare_rows`` does. Raises DamagedRowError."""
        if not store.compares_rows:
            return
        numbers = np.arange(store.spec.num_rows + 1)
        watched = numbers[self.watched]
        is_whole = len(watched) == 1 and watched[0] == numbers[-1]
        store.compare_rows(numbers[:-1] if is_whole else watched)

    def make_trailer(self, store: MappedStore, before: NDArray[np.int64]) -> Trailer:
        """Returns the status that ends the read: whether the watched generations are unchanged."""
        version = store.generations.content_version

        def make_columns() -> list[NDArray[np.int64]]:
            is_whole = np.array_equal(store.generations.values[self.watched], before) and store.is_current
            return [make_status_column(ReadStatus.WHOLE if is_whole else ReadStatus.TORN, version)]

        return make_columns


def plan_selection(store: MappedStore, selection: Selection, keys: Sequence[Path]) -> ReadPlan:
    """Returns the plan of a read. Raises as ``plan_read``."""
    if selection.listed is not None:  # its message would be long, and hardly recur
        return _plan(store, selection, keys)
    asked = control_pb2.ReadRequest(
        selection=selection.to_message(), keys=[content_pb2.Path(parts=path) for path in keys]
    )
    return plan_read(store, asked)


def plan_read(store: MappedStore, asked: Asked) -> ReadPlan:
    """Returns the plan of a read that a message describes; the plan is kept for the next read.

    Raises:
        KeyNotFoundError, SelectionError: The expression does not fit the store.
    """
    keys = decode_paths(asked.keys)
    if asked.selection.ByteSize() > MAX_KEPT_BYTES:
        return _plan(store, from_message(asked.selection), keys)
    parts = [asked.selection.SerializeToString(), *(key.SerializeToString() for key in asked.keys)]
    name = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    plan: ReadPlan | None = store.plans.get(name)
    if plan is None:
        plan = _plan(store, from_message(asked.selection), keys)
        if len(name) <= MAX_KEPT_BYTES and plan.num_positions <= MAX_KEPT_POSITIONS:
            if len(store.plans) >= MAX_KEPT_PLANS:
                store.plans.clear()
            store.plans[name] = plan
    return plan


def _plan(store: MappedStore, expression: Selection, keys: Sequence[Path]) -> ReadPlan:
    batch_size = store.spec.batch_size
    selection = expression.canonicalise(batch_size, store=store.name)
    spec = select_spec(store.spec, selection, keys, store=store.name)
    needs_elements = store.spec.values and not selection.is_everything
    return ReadPlan(
        spec=spec,
        layout=read_layout(spec),
        index=to_torch_index(selection, batch_size) if selection.items else (),
        watched=selection.compute_watched(batch_size),
        elements=selection.compute_elements(batch_size) if needs_elements else None,
    )
