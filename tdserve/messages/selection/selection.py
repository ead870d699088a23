"""Index expressions over batch dimensions as data: parsed from Python, checked against a batch size, sent as messages.

The meaning is torch's, as in ``TensorDict.__getitem__``. An integer removes its dimension and is not an advanced index.
A boolean array stands for the positions of its true elements. Advanced indices broadcast together; their dimensions
stay in place if they are neighbours, otherwise they come first. One addition, which tensordict 0.15 refuses: a slice
with a negative step has NumPy's meaning.

NumPy only, since control uses it; ``torch_selection`` applies selections to leaves. This file reads no content and
refers to no store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from tdserve.base.errors import RemoteProtocolError, SelectionError
from tdserve.messages.row_numbers import PIECE_ROWS, sort_unique
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.items import (
    FULL,
    Item,
    Mask,
    Positions,
    count_covered,
    decode_item,
    describe,
    encode_item,
    expand_slice,
    is_full,
    is_mask,
    is_same,
    parse_item,
)
from tdserve.structure.trees.nodes import MAX_DIMS
from tdserve.v1 import content_pb2

_NO_ROWS: Positions = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """An index expression as a list of items, as in the tuple between the brackets. Without items it selects
    everything.

    Attributes:
        items: The parsed items. Arrays are shared with the caller and never written.
    """

    items: tuple[Item, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection) or len(self.items) != len(other.items):
            return NotImplemented if not isinstance(other, Selection) else False
        return all(map(is_same, self.items, other.items))

    def __hash__(self) -> int:
        return hash(self.to_message().SerializeToString(deterministic=True))

    def __repr__(self) -> str:
        text = "[" + ", ".join(map(describe, self.items)) + "]"
        return text if len(text) <= 120 else text[:117] + "..."

    @property
    def is_everything(self) -> bool:
        """Whether it selects all, in place. Exact for canonical selections; for others it may be False although it
        does."""
        return not self.items or all(item is ... or is_full(item) for item in self.items)

    @property
    def listed(self) -> Positions | None:
        """The rows, if the selection is only a list of rows; otherwise None."""
        only = self.items[0] if len(self.items) == 1 else None
        if is_mask(only) or not isinstance(only, np.ndarray) or only.ndim != 1:
            return None
        positions: Positions = only.view(np.int64)  # masks were excluded above
        return positions

    def check(self, batch_size: Sequence[int], store: str = "") -> None:
        """Raises if the selection does not fit.

        Raises:
            SelectionError: An index is out of range, there are more indices than dimensions, two ellipses, a mask of
                another shape, arrays that do not broadcast, a step of 0. Nothing was read or written.
        """
        self.canonicalise(batch_size, store=store)

    def canonicalise(self, batch_size: Sequence[int], *, store: str = "") -> Selection:
        """Returns the same selection in its unique simple form for this batch size.

        Integers are not negative; an ellipsis is written out; slices are ``slice(None)`` if full, otherwise they have
        an integer start and step, and an integer stop unless they run down to the first element; trailing full slices
        are left out. So everything is ``()``.

        Raises:
            SelectionError: As in :meth:`check`.
        """
        items = self.items
        if len(items) == 1 and len(batch_size) == 1 and items[0] is not None and items[0] is not ...:
            # The hot path: rows of a store with one batch dimension.
            only = items[0]
            if not is_mask(only):
                kept = self._make_canonical_item(only, batch_size[0], 0, store)
                return EVERYTHING if is_full(kept) else self if kept is only else Selection((kept,))
        found: list[Item] = []
        dim = 0
        for item in self._expand(len(batch_size), store):
            if item is None or item is ...:
                found.append(None)
            elif is_mask(item):
                if item.shape != tuple(batch_size[dim : dim + item.ndim]):
                    covered = list(batch_size[dim : dim + item.ndim])
                    self._fail(store, f"a mask of shape {list(item.shape)} stands at dimensions of size {covered}")
                found.append(item)
                dim += item.ndim
            else:
                found.append(self._make_canonical_item(item, batch_size[dim], dim, store))
                dim += 1
        while found and is_full(found[-1]):
            found.pop()
        done = Selection(tuple(found))
        done._broadcast_shape(store)
        return done

    def compute_batch_size(self, batch_size: Sequence[int]) -> tuple[int, ...]:
        """Returns the batch size of the result of a checked selection from a tensordict of ``batch_size``."""
        if len(self.items) == 1 and len(batch_size) == 1:
            only = self.items[0]
            if isinstance(only, int):
                return ()
            if isinstance(only, slice):
                return (len(range(*only.indices(batch_size[0]))),)
            if isinstance(only, np.ndarray) and not is_mask(only):
                return only.shape
        return self._place_items(batch_size)[1]

    def compute_watched(self, batch_size: Sequence[int]) -> slice | Positions:
        """Returns the places of the generations that show whether a canonical selection was written: those of its rows;
        of everything, the store's own, which is the last."""
        if self.is_everything:
            return slice(-1, None)
        return self.compute_rows(batch_size) if self.listed is None else self.listed

    def compute_rows(self, batch_size: Sequence[int]) -> Positions:
        """Returns the indices of the first dimension that a checked selection touches, sorted, each once.

        A tensordict without batch dimensions is one row, so the result for batch size ``[]`` is ``[0]``.
        """
        if not batch_size:
            return np.zeros(1, np.int64)
        if 0 in self.compute_batch_size(batch_size):
            return _NO_ROWS
        for item in self._expand(len(batch_size), ""):
            if isinstance(item, slice):
                found = expand_slice(item, batch_size[0])
                return found if item.step is None or item.step > 0 else found[::-1].copy()
            if is_mask(item) and item.ndim:
                return np.flatnonzero(item.reshape(batch_size[0], -1).any(axis=1)).astype(np.int64, copy=False)
            if isinstance(item, int):
                return np.array([item + batch_size[0] if item < 0 else item], np.int64)
            if isinstance(item, np.ndarray) and not is_mask(item):
                return sort_unique(np.where(item < 0, item + batch_size[0], item).reshape(-1))
        return np.arange(batch_size[0], dtype=np.int64)

    def compute_row_set(self, batch_size: Sequence[int]) -> RowSet:
        """Returns the same rows as a set; for a slice it costs nothing, however many they are."""
        if not batch_size or 0 in self.compute_batch_size(batch_size):
            return RowSet.run(0, 0 if batch_size else 1)
        first = next((item for item in self._expand(len(batch_size), "") if item is not None), FULL)
        if isinstance(first, slice):
            return RowSet.from_range(range(*first.indices(batch_size[0])))
        if is_mask(first) and first.ndim:
            return RowSet.from_mask(
                np.asarray(first.reshape(batch_size[0], -1).any(axis=1)) if first.ndim > 1 else first
            )
        return RowSet.from_rows(self.compute_rows(batch_size))

    @property
    def is_long(self) -> bool:
        """Whether it lists so many positions or elements that visiting them takes long."""
        return any(isinstance(item, np.ndarray) and item.size > PIECE_ROWS for item in self.items)

    def replace_negative_steps(self, batch_size: Sequence[int]) -> Selection:
        """Returns an equal selection whose items torch can apply to a tensor: it has positions for negative steps.

        If such a slice stands alone, its positions replace it. Beside other arrays they would broadcast with them
        instead of spanning a dimension of their own, so then every dimension gets positions in the shape of the result.
        ``self`` must be canonical.
        """
        is_down = [isinstance(item, slice) and item.step is not None and item.step < 0 for item in self.items]
        if not any(is_down):
            return self
        if sum(is_down) == 1 and not any(isinstance(item, np.ndarray) for item in self.items):
            placed, _ = self._place_items(batch_size)
            spans = [
                expand_slice(item, batch_size[dim]) if isinstance(item, slice) and is_here else item
                for (item, dim, _), is_here in zip(placed, is_down, strict=False)
            ]
            return Selection(tuple(spans))
        return Selection(self._make_mesh(batch_size))

    def compute_elements(self, batch_size: Sequence[int]) -> Positions:
        """Returns the positions in the flattened batch that a checked selection selects, in the order of the flattened
        result."""
        if not batch_size:
            return np.zeros(math.prod(self.compute_batch_size(batch_size)), np.int64)
        canonical = self.canonicalise(batch_size)
        mesh = [np.asarray(positions) for positions in canonical._make_mesh(batch_size)]
        shape = canonical.compute_batch_size(batch_size)
        spread = [np.broadcast_to(positions, shape) for positions in mesh]
        return np.ravel_multi_index(spread, tuple(batch_size)).reshape(-1).astype(np.int64, copy=False)

    def to_message(self) -> content_pb2.Selection:
        """Returns the selection as a message; it need not be checked."""
        return content_pb2.Selection(items=[encode_item(item) for item in self.items])

    # ------------------------------------------------------------------------------------------------ inner parts

    def _expand(self, num_dims: int, store: str) -> list[Item]:
        """Returns the items with the ellipsis written out, if they are not too many."""
        items = list(self.items)
        covered = sum(map(count_covered, items))
        if covered > num_dims:
            self._fail(store, f"it indexes {covered} dimensions, there are {num_dims} batch dimensions")
        where = [at for at, item in enumerate(items) if item is ...]
        if len(where) > 1:
            self._fail(store, "an index can have one ellipsis at most")
        if where:
            items[where[0] : where[0] + 1] = [FULL] * (num_dims - covered)
        return items

    def _make_canonical_item(self, item: int | slice | Positions | Mask, size: int, dim: int, store: str) -> Item:
        if isinstance(item, int):
            if not -size <= item < size:
                self._fail(store, f"index {item} is out of range for dimension {dim} of size {size}")
            return item if item >= 0 else item + size
        if isinstance(item, slice):
            if item.step == 0:
                self._fail(store, "the step of a slice cannot be 0")
            start, stop, step = item.indices(size)
            if step == 1 and start == 0 and stop == size:
                return FULL
            if len(range(start, stop, step)) == 0:
                return slice(0, 0, 1)
            # A longer step means the same, and torch's kernels overflow their integers with it.
            return slice(start, None if stop < 0 else stop, max(-size, min(step, size)))
        # As unsigned numbers, negative positions are huge: one pass checks that all are in range and none is negative.
        if item.size == 0 or int(item.view(np.uint64).max()) < size:
            return item
        low, high = int(item.min()), int(item.max())
        if low < -size or high >= size:
            bad = low if low < -size else high
            self._fail(store, f"index {bad} is out of range for dimension {dim} of size {size}")
        return np.where(item < 0, item + size, item)

    def _broadcast_shape(self, store: str) -> tuple[int, ...]:
        """Returns the common shape of all arrays; a mask counts as the list of its true elements' positions."""
        shapes = [
            (int(np.count_nonzero(item)),) if is_mask(item) else item.shape
            for item in self.items
            if isinstance(item, np.ndarray)
        ]
        if len(shapes) < 2:
            return shapes[0] if shapes else ()
        try:
            return np.broadcast_shapes(*shapes)
        except ValueError:
            self._fail(store, f"its arrays of shapes {[list(shape) for shape in shapes]} do not broadcast together")

    def _place_items(self, batch_size: Sequence[int]) -> tuple[list[tuple[Item, int, int]], tuple[int, ...]]:
        """Returns each item with the batch dimension and the result's dimension where it begins, and the result's
        size."""
        placed: list[tuple[Item, int, int]] = []
        sizes: list[int] = []
        dim = 0
        items = self._expand(len(batch_size), "")
        for item in [*items, *[FULL] * (len(batch_size) - sum(map(count_covered, items)))]:
            placed.append((item, dim, len(sizes)))
            if isinstance(item, slice):
                sizes.append(len(range(*item.indices(batch_size[dim]))))
            elif item is None:
                sizes.append(1)
            dim += count_covered(item)
        axes = [axis for item, _, axis in placed if isinstance(item, np.ndarray)]
        if not axes:
            return placed, tuple(sizes)
        block = self._broadcast_shape("")
        at = axes[0] if axes[0] == axes[-1] else 0  # neighbours stay in place, others come first
        sizes[at:at] = block
        moved = [
            (item, dim, at if isinstance(item, np.ndarray) else axis + len(block) if axis >= at else axis)
            for item, dim, axis in placed
        ]
        return moved, tuple(sizes)

    def _make_mesh(self, batch_size: Sequence[int]) -> tuple[Item, ...]:
        """Returns positions for every batch dimension, each with as many dimensions as the result."""
        placed, result = self._place_items(batch_size)
        num_block_dims = len(self._broadcast_shape(""))
        found: list[Positions] = []
        for item, dim, axis in placed:
            if item is None or item is ...:
                continue
            shape = [1] * len(result)
            if isinstance(item, np.ndarray):
                for part in np.nonzero(item) if is_mask(item) and item.ndim else [item] * count_covered(item):
                    end = axis + num_block_dims
                    found.append(
                        part.astype(np.int64, copy=False).reshape(
                            [*shape[: end - part.ndim], *part.shape, *shape[end:]]
                        )
                    )
            elif isinstance(item, slice):
                span = expand_slice(item, batch_size[dim])
                shape[axis] = len(span)
                found.append(span.reshape(shape))
            else:
                found.append(np.full(shape, item, np.int64))
        if np.broadcast_shapes(*(part.shape for part in found)) != result:
            found[0] = np.broadcast_to(found[0], result)  # a False without dimensions empties what no array spans
        return tuple(found)

    def _fail(self, store: str, reason: str) -> NoReturn:
        where = f"store {store!r}: " if store else ""
        raise SelectionError(selection=repr(self), reason=where + reason)


EVERYTHING = Selection()


def encode(index: object, *, batch_size: Sequence[int], store: str = "") -> Selection:
    """Returns the selection of ``tensordict[index]``, checked and canonical.

    Args:
        index: Integer, slice, range, ``None``, ``...``, a (nested) list or array or tensor of integers or booleans, or
            a tuple of those. Tensors may lie on any device.
        batch_size: Batch size of the tensordict.
        store: Its name, for the message of an error.

    Raises:
        SelectionError: It is not an index, or does not fit. Nothing was read or written.
    """
    return parse(index, store=store).canonicalise(batch_size, store=store)


def parse(index: object, *, store: str = "") -> Selection:
    """Parses an expression, without checking it against a size.

    Raises:
        SelectionError: It is not an index: a string, a float, an array of another dtype, a list that is not an array.
    """
    try:
        return Selection(tuple(map(parse_item, index)) if isinstance(index, tuple) else (parse_item(index),))
    except (TypeError, ValueError, OverflowError) as fault:
        where = f"store {store!r}: " if store else ""
        raise SelectionError(selection=describe(index)[:120], reason=f"{where}{fault}") from None


def from_message(message: content_pb2.Selection) -> Selection:
    """Returns the selection that a peer sent. Its items are well formed; :meth:`Selection.check` checks whether they
    fit.

    Raises:
        RemoteProtocolError: The message contradicts itself. Nothing was changed.
    """
    if len(message.items) > MAX_DIMS:
        raise RemoteProtocolError(expected=f"at most {MAX_DIMS} index items", received=f"{len(message.items)}")
    return Selection(tuple(map(decode_item, message.items)))
