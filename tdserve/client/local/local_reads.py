"""Content that a local client copies out of the server's files, or views in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from tdserve.base.errors import CorruptDataError, StoreNotFoundError, TransferAbortedError
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.received import Received, make_views
from tdserve.client.local.root_files import make_deleted_error
from tdserve.client.local.sharing import MIN_SHARED_BYTES, count_threads, share
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.read_plans import ReadPlan, plan_selection
from tdserve.data.rows_source import make_rows_source
from tdserve.data.values import ReadBlock, read_block
from tdserve.messages.content import ReadStatus, make_rows_layout, make_status_column
from tdserve.messages.layout import Layout
from tdserve.messages.row_numbers import spread
from tdserve.messages.selection.selection import Selection
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.store.rows.generations import sum_generations
from tdserve.structure.tensors.torch_types import to_indexable, to_torch, view_bytes
from tdserve.structure.trees.tree import Path, Spec
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import RowBuffers, Source
from tdserve.v1 import control_pb2

PIECE_BYTES = 2 * 1024 * 1024
"""Pieces of a copy that several threads share: about 100 microseconds each. With pieces of a quarter of that, the
threads contend for the interpreter's lock so often that half of the gain is lost (measured)."""

MAX_CLONED_BYTES = 4096
"""Up to this size, tensors are cloned one by one: for a few small ones that is faster than making a common buffer."""

NOTHING_ADDED: Mapping[str, bytes] = MappingProxyType({})
"""No columns beside those of the rows."""


@dataclass(frozen=True)
class Copied:
    """Rows that were copied.

    Attributes:
        received: The columns, as over any transport.
        values: A serialised ValueBlock, or its columns.
    """

    received: Received
    values: bytes | ReadBlock


def copy_rows(
    store: MappedStore,
    chosen: Spec,
    found: FoundRows,
    *,
    added: Mapping[str, bytes],
    values: bytes,
    pool: BufferPool,
) -> Copied:
    """Copies chosen rows of a table.

    Args:
        store: The table.
        chosen: Its structure, as the caller knows it, or the part of it to copy.
        found: The rows.
        added: Columns that the table adds to them.
        values: Their values, as a serialised ValueBlock; by default they are read too.
        pool: Gives the memory.

    Raises:
        TransferAbortedError: The store was deleted since.
        CorruptDataError: Its files are damaged.
    """
    layout = make_rows_layout(chosen, len(found.rows), tuple(added))
    block: bytes | ReadBlock = values
    if chosen.values and not values:
        elements = spread(found.rows, math.prod(chosen.batch_size[1:]))
        try:
            block = read_block(store, [path for path, _ in chosen.values], elements)
        except (StoreNotFoundError, CorruptDataError) as error:
            if isinstance(error, CorruptDataError) and not store.generations.is_deleted:
                raise
            raise make_deleted_error(store.name) from error
    source = make_rows_source(store, layout, found, added)
    columns = _read_columns(source, layout, pool)
    if store.generations.is_deleted:
        raise make_deleted_error(store.name)
    return Copied(Received(layout, columns), block)


def _read_columns(source: RowBuffers, layout: Layout, pool: BufferPool) -> Sequence[torch.Tensor]:
    """Returns all columns of the rows, in one buffer whose pages were touched before."""
    if layout.num_leaves or pool.is_shared or not layout.slots[0].nbytes:  # torch cannot view nothing in another dtype
        return make_views(layout, _fill_buffer(source, layout, pool), shares_storage=pool.is_shared)
    # Only added columns: a few numbers per row, for which a buffer takes longer than a copy of each.
    columns = ((source.get_trailing(number), slot.dtype) for number, slot in enumerate(layout.slots))
    return [torch.from_numpy(column.copy()).view(to_torch(dtype)) for column, dtype in columns]


def _fill_buffer(source: Source, layout: Layout, pool: BufferPool) -> torch.Tensor:
    buffer = pool.take(layout.nbytes)
    if isinstance(source, RowBuffers) and layout.nbytes >= MIN_SHARED_BYTES and (threads := count_threads()) > 1:
        target = buffer.numpy()
        share(source.make_copies(target, PIECE_BYTES), threads)
        for number, slot in enumerate(layout.slots[layout.num_leaves :], layout.num_leaves):
            target[slot.offset : slot.offset + slot.nbytes] = source.get_trailing(number)
        return buffer
    for message in layout.messages:
        source.fill(message, buffer[message.offset : message.offset + message.nbytes])
    return buffer


@dataclass(frozen=True)
class Selected:
    """A selection of a mapped store, copied as of one moment.

    Attributes:
        spec: Its structure.
        leaves: Its tensors by path, in buffers of their own or in the caller's memory.
        values: A serialised ValueBlock, or its columns.
        version: Content version of the store.
    """

    spec: Spec
    leaves: dict[Path, torch.Tensor]
    values: bytes | ReadBlock
    version: int


def copy_selection(
    store: MappedStore,
    selection: Selection,
    keys: Sequence[Path],
    accepted: control_pb2.Accepted | None = None,
    *,
    pool: BufferPool,
    into: Leaves | None = None,
) -> Selected | None:
    """Copies a selection; None if it was changed meanwhile, or is being written.

    Args:
        accepted: The server's answer, if it was asked: with the values, if this process cannot read them itself.
        into: The caller's tensors, in the order of the selection's layout.

    Raises:
        TransferAbortedError: The selection was written since the server has read the values. The caller asks again.
    """
    plan = plan_selection(store, selection, keys)
    generations = store.generations
    before = generations.values[plan.watched].copy()
    if (before & 1).any():
        return None
    version = generations.content_version
    values: bytes | ReadBlock = b"" if accepted is None else accepted.values
    if accepted is not None and values and sum_generations(before) != accepted.generation_sum:
        raise TransferAbortedError(transfer=0, reason=f"{store.name!r} was written while its values were sent")
    try:
        if plan.spec.values and not values:
            values = read_block(store, [path for path, _ in plan.spec.values], plan.elements)
    except StoreNotFoundError:  # deleted just now: another store may have this name
        return None
    plan.compare_rows(store)
    leaves = _copy_leaves(store, plan, pool, into)
    if not store.is_current or not np.array_equal(generations.values[plan.watched], before):
        return None
    return Selected(plan.spec, leaves, values, version)


def _copy_leaves(store: MappedStore, plan: ReadPlan, pool: BufferPool, into: Leaves | None) -> dict[Path, torch.Tensor]:
    slots = plan.layout.slots[: plan.layout.num_leaves]
    if into is None and plan.rows is not None and (pool.is_shared or plan.layout.nbytes > MAX_CLONED_BYTES):
        return _gather(store, plan, pool)
    leaves = [store.leaves[slot.path] for slot in slots]
    chosen = [to_indexable(leaf)[plan.index].view(leaf.dtype) if plan.index else leaf for leaf in leaves]
    if into is not None:
        targets: Sequence[torch.Tensor] = into.tensors
    elif pool.is_shared:
        targets = make_views(plan.layout, pool.take(plan.layout.nbytes), shares_storage=True)
    elif any(_is_copy(found, leaf) for found, leaf in zip(chosen, leaves, strict=True)):
        targets = chosen  # an index by positions copies anyway
    elif plan.layout.nbytes <= MAX_CLONED_BYTES:
        return {slot.path: found.clone() for slot, found in zip(slots, chosen, strict=True)}
    else:
        targets = make_views(plan.layout, pool.take(plan.layout.nbytes))
    for target, found in zip(targets, chosen, strict=False):
        if target is not found and target.numel():
            copy_tensor(target, found)
    return {slot.path: target for slot, target in zip(slots, targets, strict=False)}


def _gather(store: MappedStore, plan: ReadPlan, pool: BufferPool) -> dict[Path, torch.Tensor]:
    """Copies rows by number, leaf by leaf, into one buffer whose pages were touched before."""
    layout = plan.layout
    source = plan.make_source(store, lambda: [make_status_column(ReadStatus.WHOLE)])
    return Received(
        layout, make_views(layout, _fill_buffer(source, layout, pool), shares_storage=pool.is_shared)
    ).get_leaves()


def _is_copy(chosen: torch.Tensor, leaf: torch.Tensor) -> bool:
    return bool(chosen.numel()) and chosen.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()


def copy_tensor(target: torch.Tensor, content: torch.Tensor) -> None:
    """Copies with NumPy in the calling thread; torch's own copy would wait for cores that may be busy."""
    if content.is_contiguous() and target.is_contiguous():
        np.copyto(view_bytes(target).numpy(), view_bytes(content).numpy())
    else:
        target.copy_(content)
