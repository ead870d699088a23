"""Content that a local client writes in place: into rows that are reserved for it, or that it may overwrite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tdserve.base.errors import LocalProtocolError
from tdserve.client.content.leaves import iter_contents
from tdserve.client.local.end import LocalEnd
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.places import Places
from tdserve.messages.content import write_layout
from tdserve.messages.selection.selection import Selection
from tdserve.messages.selection.torch_selection import to_torch_index
from tdserve.store.rows.shown_memory import is_view_of_store
from tdserve.store.weights.versions import VersionFile, list_leaf_places
from tdserve.structure.captures.capture import Captured
from tdserve.structure.tensors.file_tensors import MAX_BLOCK_BYTES, FileTensor, split_spans
from tdserve.structure.tensors.torch_types import to_indexable, view_bytes
from tdserve.transport.sources_sinks import copy_bytes
from tdserve.v1 import control_pb2

LONG_COPY_BYTES = 1 << 20
"""Copies from this size on are long: some 50 µs, about what a message costs."""


def put_rows(
    store: MappedStore,
    accepted: control_pb2.Accepted,
    captured: Sequence[Captured],
    *,
    look: Callable[[], None] = lambda: None,
) -> control_pb2.Written:
    """Fills the rows that the server has reserved. Arguments as in ``fill_rows``."""
    places = Places.decode(accepted.rows)
    num_rows = fill_rows(store, places, captured, look=look)
    everywhere = places.get_part(0, num_rows)
    columns = [store.get_table(tuple(key.parts))[everywhere].tobytes() for key in accepted.columns]
    return control_pb2.Written(columns=columns)


def fill_rows(
    store: MappedStore, places: Places, captured: Sequence[Captured], *, look: Callable[[], None] = lambda: None
) -> int:
    """Fills rows; leaves that the content lacks become zero. Returns the number of filled rows.

    Args:
        places: Their places.
        captured: Their content, in order.
        look: Called after every long copy, to handle what should not wait for all of them.
    """
    first = 0
    for each in captured:
        num_rows = each.spec.batch_size[0]
        own = places.get_part(first, num_rows)
        is_read = each.is_in_files
        if is_read:
            _put_read(store, places, first, each, look)
        paths = write_layout(each.spec).leaf_paths if num_rows and not is_read else ()
        for path, content in zip(paths, iter_contents(each, paths), strict=True):
            store.get_table(path)[own] = content.reshape(num_rows, -1)
            if content.nbytes >= LONG_COPY_BYTES:
                look()
        first += num_rows
    if len(captured[0].spec.tensors) < len(store.leaves):
        everywhere = places.get_part(0, first)
        for path in store.leaves.keys() - dict(captured[0].spec.tensors).keys():
            store.get_table(path)[everywhere] = 0  # a row's earlier content must not show
    return first


def _put_read(store: MappedStore, places: Places, first: int, captured: Captured, look: Callable[[], None]) -> None:
    """Fills rows from number ``first`` on with leaves that are read from a file, a few at a time."""
    for path, tensor in captured.tensors.items():
        table = store.get_table(path)
        if not isinstance(tensor, FileTensor):
            content = view_bytes(tensor.cpu().contiguous()).numpy()
            table[places.get_part(first, len(tensor))] = content.reshape(len(tensor), -1)
            continue
        row_nbytes = table.shape[1]
        num_rows = max(MAX_BLOCK_BYTES // max(row_nbytes, 1), 1)
        for start in range(0, len(tensor), num_rows):
            stop = min(start + num_rows, len(tensor))
            piece = tensor.read_piece(start * row_nbytes, stop * row_nbytes)
            table[places.get_part(first + start, stop - start)] = piece.reshape(stop - start, -1)
            look()


def put_selection(store: MappedStore, selection: Selection, captured: Captured, *, is_hidden: bool = False) -> None:
    """Overwrites a selection.

    All that can raise does so before the first byte is copied: a file that is read block by block is read twice.

    Args:
        is_hidden: Whether the store is invisible yet.

    Raises:
        LocalProtocolError: Rows were overwritten in part.
        Exception: Of the content. Nothing was written, or nothing that is seen.
    """
    copies = [*_prepare_copies(store, selection, captured)]
    try:
        for copy in copies:
            copy()
    except Exception as fault:
        if is_hidden:
            raise
        reason = f"rows are damaged, because only a part of their new content could be read: {fault!r}"[:300]
        raise LocalProtocolError(reason=reason) from fault


def _prepare_copies(store: MappedStore, selection: Selection, captured: Captured) -> Iterator[Callable[[], object]]:
    """Yields what copies each leaf."""
    index = to_torch_index(selection, store.spec.batch_size) if selection.items else ()
    for path, tensor in captured.tensors.items():
        leaf = store.leaves[path]
        if not isinstance(tensor, FileTensor) and is_view_of_store(tensor, store.folder):
            tensor = tensor.clone()
        if isinstance(tensor, FileTensor) and (not index or _is_basic(index)):
            for block in split_spans(tuple(tensor.shape), tensor.element_size()):
                tensor.block(block)  # shows whether it can be read
            place = to_indexable(leaf)[index] if index else to_indexable(leaf)
            yield partial(_copy_blocks, place, tensor)
        elif index:
            yield partial(to_indexable(leaf).__setitem__, index, to_indexable(tensor.cpu()))
        elif tensor.is_contiguous() and tensor.device.type == "cpu":
            yield partial(copy_bytes, view_bytes(leaf), view_bytes(tensor))
        else:
            yield partial(leaf.copy_, tensor)


def _copy_blocks(place: torch.Tensor, tensor: FileTensor) -> None:
    for block in split_spans(tuple(tensor.shape), tensor.element_size()):
        place[block].copy_(to_indexable(tensor.block(block)))


def _is_basic(index: tuple[Any, ...]) -> bool:
    """Returns whether an index selects a view."""
    return all(item is None or type(item) in (int, slice) for item in index)


def put_version(local: LocalEnd, accepted: control_pb2.Accepted, captured: Captured, values: bytes) -> None:
    """Makes and seals the file of a version, which becomes visible when the server publishes it.

    Raises:
        CapacityError: The disk is full; no file is left.
    """
    recycles = local.root / accepted.recycles if accepted.recycles else None
    file = VersionFile.create(local.root / accepted.path, captured.spec, recycles=recycles)
    paths = [path for path, _, _ in list_leaf_places(captured.spec)]
    file.fill(iter_contents(captured, paths))
    if values:
        file.write_values(values)
    file.seal()
