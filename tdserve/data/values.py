"""Moves non-tensor values between messages and a store's objects, without decoding them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tdserve.base.errors import CorruptDataError, NotSupportedError, RemoteProtocolError
from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.content import has_bundles
from tdserve.messages.row_numbers import decode_rows, spread
from tdserve.messages.selection.selection import from_message
from tdserve.store.exchange.spools import read_spooled
from tdserve.store.values.objects import Count, ObjectColumn
from tdserve.structure.tensors.torch_types import to_indexable
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Path
from tdserve.v1 import content_pb2, worker_pb2
from tdserve.values.value_bundles import Unbundled, encode_bundles
from tdserve.values.value_codec import NONE
from tdserve.values.value_columns import JoinedValues, ValueColumn, decode_block, encode_block, measure_sizes

Elements = npt.NDArray[np.int64]


class ReadBlock(NamedTuple):
    """The columns of a ValueBlock that was never a message.

    Attributes:
        columns: One per path.
    """

    columns: list[ValueColumn]


def read_columns(
    store: MappedStore,
    paths: Sequence[Path],
    elements: Elements | None,
    *,
    splits: bool = False,
    count: Count | None = None,
) -> list[ValueColumn]:
    """Returns the values of these elements of the store's flattened batch, as of one moment; ``None`` is all of it, in
    order.

    A leaf below a nested tensordict with more batch dimensions has several values per element.

    Args:
        splits: Whether shapes of ragged tensors are returned apart from their content, as heads.
        count: As in ``Objects.get_many``.

    Raises:
        CorruptDataError: A value that the catalog lists is missing. Values of rows that have left their table may be
            missing.
        TransferAbortedError: It went meanwhile, together with its key.
    """
    if not paths:
        return []
    objects = store.open_objects(writable=False)
    if objects is None:
        numbers = [(path, _find_positions(store, path, elements)) for path in paths]
        return [_check_column(store, path, rows, True, [None] * len(rows)) for path, rows in numbers]
    wanted = [(path, _find_positions(store, path, elements)) for path in paths]
    found = objects.get_many(wanted, joined=_find_ragged(store, splits), count=count)
    return [_check_column(store, path, rows, *column) for (path, rows), column in zip(wanted, found, strict=True)]


def _check_column(
    store: MappedStore, path: Path, rows: Elements, per_row: bool, values: Sequence[bytes | None]
) -> ValueColumn:
    if isinstance(values, JoinedValues):
        return ValueColumn(per_row, values)
    present = [value for value in values if value is not None]
    if len(present) == len(values):
        return ValueColumn(per_row, present)
    if not len(rows):  # no elements have no value, not even one that all share
        return ValueColumn(True, [])
    store.check_current()
    if store.spec.batch_size and _has_left(store, path, rows if not per_row else _find_lacking(rows, values)):
        found = values if per_row else [None] * len(rows)
        return ValueColumn(True, [NONE if value is None else value for value in found])
    where = f"row {rows[values.index(None)]}" if per_row else "every row"
    raise CorruptDataError(path=str(store.folder), expected=f"a value of {path} at {where}", actual="none")


def _find_lacking(rows: Elements, values: Sequence[bytes | None]) -> Elements:
    return rows[[value is None for value in values]]


def _has_left(store: MappedStore, path: Path, rows: Elements) -> bool:
    """Returns whether all of these rows have left their table, perhaps with their values; a reader of them sees that
    they moved."""
    num_each = math.prod(store.value_batch_sizes[path]) // store.spec.batch_size[0]
    return bool((store.generations.values[rows // max(num_each, 1)] & 1).all())


def _find_ragged(store: MappedStore, splits: bool) -> dict[Path, int]:
    """Returns the paths of ragged tensors, and the number of bytes of each element that are returned apart."""
    found: dict[Path, int] | None = store.spec.memo.get(("ragged", splits))
    if found is None:
        found = store.spec.memo["ragged", splits] = {
            path: 8 * len(leaf.ragged.shape) * splits
            for path, leaf in store.spec.values
            if leaf.ragged is not None and leaf.ragged.dtype
        }
    return found


def read_block(store: MappedStore, paths: Sequence[Path], elements: Elements | None) -> ReadBlock:
    """Returns the result of ``read_columns`` as a block, for a reader in this process."""
    return ReadBlock(read_columns(store, paths, elements, splits=True))


def read_values(
    store: MappedStore, paths: Sequence[Path], elements: Elements | None, *, count: Count | None = None
) -> bytes:
    """Returns the result of ``read_columns`` as a serialised ValueBlock; ``b""`` without paths."""
    return encode_block(read_columns(store, paths, elements, count=count))


def measure_rows(store: MappedStore, path: Path, rows: Elements) -> Elements:
    """Returns the size of a leaf in each row: the sum of a tensor's elements, or the bytes of its values; 0 where rows
    share one value.

    Raises:
        NotSupportedError: The tensor has numbers that are not integers.
    """
    if path in store.leaves:
        leaf = store.leaves[path]
        if leaf.is_floating_point() or leaf.is_complex():
            raise NotSupportedError(feature=f"balance={path!r}", reason=f"sizes are integers, not {leaf.dtype}")
        sums: Elements = to_indexable(leaf)[torch.tensor(rows)].reshape(len(rows), -1).sum(1).numpy()
        return sums
    (column,) = read_columns(store, [path], rows)
    if not column.per_row:
        return np.zeros(len(rows), np.int64)
    sizes = column.values.sizes if isinstance(column.values, JoinedValues) else measure_sizes(column.values)
    total: Elements = sizes.reshape(len(rows), -1).sum(axis=1)
    return total


def put_values(store: MappedStore, order: worker_pb2.PutValues, *, before: bytes = b"") -> None:
    """Stores a ValueBlock; called only in the one worker that writes values.

    Args:
        before: Columns that precede those of the order.

    Raises:
        CapacityError: The environment is full; nothing was stored.
        RemoteProtocolError: The block does not fit the keys; nothing was stored.
    """
    spooled = read_spooled(order.spool, order.spool_offset, order.spool_nbytes) if order.spool else b""
    block = decode_block(before + spooled + order.values)  # concatenated blocks are one block
    paths = [_decode_path(key) for key in order.keys]
    num_columns = 1 if order.is_bundled else len(paths)
    if len(block) != num_columns:
        raise RemoteProtocolError(expected=f"{num_columns} columns of values", received=f"{len(block)}")
    elements = _decode_elements(store, order)
    if order.is_whole and elements is not None and has_bundles(store.spec):
        _put_bundles(store, paths, elements, block, is_bundled=order.is_bundled)
    elif order.is_bundled:
        raise RemoteProtocolError(expected="columns of values", received="bundles")
    else:
        _put_columns(store, order, paths, elements, block)


def _decode_elements(store: MappedStore, order: worker_pb2.PutValues) -> Elements | None:
    """Returns the elements of the flattened batch that an order names; None for all."""
    if order.HasField("elements"):
        return decode_rows(order.elements)
    selection = from_message(order.selection)
    return None if selection.is_everything else selection.compute_elements(store.spec.batch_size)


def _put_bundles(
    store: MappedStore, paths: Sequence[Path], elements: Elements, block: Sequence[ValueColumn], *, is_bundled: bool
) -> None:
    columns = [column.get_views(path, len(elements)) for path, column in zip(paths, block, strict=not is_bundled)]
    if is_bundled:
        (bundles,) = columns
        Unbundled(bundles, len(paths))  # checked before they are stored
    else:
        each = [values if len(values) == len(elements) else list(values) * len(elements) for values in columns]
        bundles = encode_bundles(each)
    store.open_writable_objects().put_bundles(paths, elements, bundles)


def _put_columns(
    store: MappedStore,
    order: worker_pb2.PutValues,
    paths: Sequence[Path],
    elements: Elements | None,
    block: Sequence[ValueColumn],
) -> None:
    batch_sizes = store.value_batch_sizes
    if order.HasField("spec"):
        batch_sizes = {path: leaf.batch_size for path, leaf in codec.decode(order.spec).values}
    below: Path = (order.below,) if order.below else ()
    columns = []
    for path, column in zip(paths, block, strict=True):
        rows = _spread_elements(batch_sizes[path], len(store.spec.batch_size), elements)
        columns.append(ObjectColumn.from_block(below + path, column, rows, is_every_row=elements is None))
    clear = [below + path for path in paths] if elements is None else ()
    store.open_writable_objects().put_many(columns, clear=clear)


def move_values(store: MappedStore, order: worker_pb2.MoveValues) -> None:
    """Moves the values of leaves to other keys; called only in the one worker that writes values.

    Raises:
        CapacityError: The environment is full; nothing was changed.
    """
    moves = [
        (_decode_path(source), _decode_path(target))
        for source, target in zip(order.sources, order.targets, strict=True)
    ]
    store.open_writable_objects().move(
        moves, cleared=map(_decode_path, order.cleared), cleared_below=order.cleared_below
    )


def drop_values(store: MappedStore, rows: Elements) -> int:
    """Deletes the values of rows; returns how many there were. Called only in the one worker that writes values.

    Raises:
        CapacityError: There is not even room for that; nothing was deleted.
    """
    elements = spread(rows, math.prod(store.spec.batch_size[1:]))
    return store.open_writable_objects().drop(
        [(path, _find_positions(store, path, elements)) for path, _ in store.spec.values]
    )


def _find_positions(store: MappedStore, path: Path, elements: Elements | None) -> Elements:
    """Returns the positions in a leaf's own flattened batch that belong to elements of the store's."""
    return _spread_elements(store.value_batch_sizes[path], len(store.spec.batch_size), elements)


def _spread_elements(batch_size: tuple[int, ...], num_dims: int, elements: Elements | None) -> Elements:
    if elements is None:
        return np.arange(math.prod(batch_size))
    return spread(elements, math.prod(batch_size[num_dims:]))


def _decode_path(key: content_pb2.Path) -> Path:
    return tuple(key.parts)
