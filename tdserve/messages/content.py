"""The content of one transfer: the spec of what is selected, and the columns that the service adds behind it.

Pure. Client, control and data worker compute the same from the same spec, so that only bytes have to travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.messages.layout import MAX_MESSAGE_BYTES, Layout, Message, Trailing
from tdserve.messages.selection.selection import Selection
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2

INDEX_KEY = "index"
GENERATION_KEY = "generation"

POLICY_VERSION_KEY = "policy_version"
"""Key that a table with a policy adds to samples, and that its rows may not have at the root: the version that made the
row."""

SLICE_END_KEY = "slice_end"
"""Key of the mark on the last row of a slice. At the client it becomes ``("next", "truncated")`` if rows have that key,
and is then not shown."""


class AddedColumn(NamedTuple):
    """A column that a table may add to each row of a sample.

    Attributes:
        dtype: Dtype of its numbers.
        is_reserved: Whether the rows of no replay may have this key at the root. The others are taken only where a
            table's settings add them.
    """

    dtype: str
    is_reserved: bool = True


ADDED_COLUMNS = {
    "priority": AddedColumn("float32"),
    "probability": AddedColumn("float32"),
    "priority_weight": AddedColumn("float32"),
    "times_sampled": AddedColumn("int64"),
    POLICY_VERSION_KEY: AddedColumn("int64", is_reserved=False),
    SLICE_END_KEY: AddedColumn("bool", is_reserved=False),
}
"""Columns that a table may add to each row of a sample, in the order in which they travel; its settings determine
which. Append only: the position of a name is its bit in ``SampleRequest.added``."""

ADDED_DTYPES = {name: column.dtype for name, column in ADDED_COLUMNS.items()}
"""Their dtypes."""

COLUMN_BITS = {name: 1 << number for number, name in enumerate(ADDED_DTYPES)}
"""The bit of each in ``SampleRequest.added``."""

ADDED_KEYS = frozenset((INDEX_KEY, GENERATION_KEY, *ADDED_DTYPES))
"""All keys that a sample may have beside its rows. In rows that are written they are ignored, unless the rows of the
table have them."""

RESERVED_KEYS = (INDEX_KEY, GENERATION_KEY, *(name for name, column in ADDED_COLUMNS.items() if column.is_reserved))
"""Keys that the service adds to a sample; rows of a replay may not have them at the root."""

MAX_SAMPLE_ROWS = 1 << 24
"""Most rows of one request: row numbers and generations of more would take 256 MiB in the control process, which serves
all clients."""

MIN_SENT_VALUES_BYTES = 64 * 1024
"""A block of values of this size or more travels as data messages behind the leaves, which costs one more wait. A
smaller one travels in the request or the answer, which costs two more copies and time of the control process."""


MAX_INLINE_VALUES_BYTES = 1024 * 1024
"""Most values in an answer to a client that takes none as data messages."""

MAX_PACKED_BYTES = 32 * 1024
MAX_PACKED_LEAVES = 64
MAX_PACKED_VALUES = 256
"""Limits of a new store's content that travels in its request and is kept in the catalog until the store is used.
Making its files then takes a few milliseconds at most."""


MAX_PACKED_ZEROS_BYTES = 64 * 1024
"""The same limit for a new store of zeros, or a table without rows, whose content takes no place in the catalog."""


def may_be_packed_as_zeros(stored: Spec) -> bool:
    """Returns whether a new store or table of this structure, rows included, needs no files before it is used."""
    return len(stored.tensors) <= MAX_PACKED_LEAVES and stored.nbytes <= MAX_PACKED_ZEROS_BYTES


def may_be_packed(spec: Spec, values_nbytes: int = 0) -> bool:
    """Returns whether a new tensordict store of this structure, with content, needs no files before it is used.

    Args:
        values_nbytes: Size of its values in a message.
    """
    if len(spec.tensors) > MAX_PACKED_LEAVES:
        return False
    if sum(math.prod(leaf.batch_size) for _, leaf in spec.values) > MAX_PACKED_VALUES:
        return False
    return values_nbytes + sum(write_layout(spec).message_nbytes) <= MAX_PACKED_BYTES


def has_bundles(spec: Spec) -> bool:
    """Returns whether the values of each new row of this structure are stored as a bundle: if it has several, one of
    each."""
    return len(spec.values) > 1 and all(leaf.batch_size == spec.batch_size for _, leaf in spec.values)


class ReadStatus(IntEnum):
    """First number of the status column that ends every read."""

    WHOLE = 0
    TORN = 1  # rows kept moving during the copy: read again
    FAILED = 2  # the content is undefined, a Failure follows on the session


STATUS_BYTES = 64

STATUS = Trailing("status", "int64", (8,))
"""[ReadStatus, content version, missing rows, 0...]: 64 bytes behind the content of every read."""


def make_status_column(outcome: ReadStatus, version: int = 0, num_torn: int = 0) -> NDArray[np.int64]:
    """Returns the column that ends a read."""
    return np.array([outcome, version, num_torn, 0, 0, 0, 0, 0], np.int64)


def mark_torn(generations: NDArray[np.int64], expected: NDArray[np.int64]) -> int:
    """Marks torn rows: those that were written or left while they were copied; returns how many. Their content is
    undefined.

    Args:
        generations: Generations after the copy. That of a torn row becomes the negative of the expected one,
            so that a client that has the row on lease can still name it.
        expected: Generations at the moment when control selected the rows.
    """
    if generations.tobytes() == expected.tobytes() and not np.bitwise_or.reduce(generations) & 1:
        return 0  # nearly always, and found in half the time
    has_moved = (generations != expected) | (generations & 1 == 1)  # odd: a part of it is being written
    generations[has_moved] = -expected[has_moved]
    return int(np.count_nonzero(has_moved))


def decode_paths(keys: Iterable[content_pb2.Path]) -> list[Path]:
    """Returns the paths that a message names, in its order."""
    return [tuple(key.parts) for key in keys]


def select_keys(spec: Spec, keys: Sequence[Path], *, store: str = "") -> Spec:
    """Returns the part of a structure that a request names; all of it if it names no keys.

    Raises:
        KeyNotFoundError: A key does not exist.
    """
    return spec.select(keys, store=store) if keys else spec


def select_spec(spec: Spec, selection: Selection, keys: Sequence[Path], *, store: str = "") -> Spec:
    """Returns the structure of ``td[selection].select(*keys)`` for a tensordict of this spec; names of dimensions are
    lost.

    Raises:
        KeyNotFoundError: A key does not exist.
        SelectionError: The index does not fit.
    """
    spec = select_keys(spec, keys, store=store)
    if not selection.items:
        return spec
    chosen = selection.canonicalise(spec.batch_size, store=store)
    rows = chosen.listed
    if rows is not None and not spec.has_ragged:
        return _make_rows_spec(spec, len(rows))
    batch_size = chosen.compute_batch_size(spec.batch_size)
    num_dims = len(spec.batch_size)
    moved = _find_moved_dims(chosen, num_dims) if spec.has_ragged else None
    taken = _select_numbers(chosen, spec.batch_size) if spec.has_members and moved is not None else None
    return spec.with_batch(num_dims, batch_size, (None,) * len(batch_size), moved=moved, taken=taken)


def _make_rows_spec(spec: Spec, num_rows: int) -> Spec:
    """Returns the structure of ``num_rows`` rows; the same object for the same number."""
    nameless: Spec | None = spec.memo.get("nameless")
    if nameless is None:
        num_dims = len(spec.batch_size)
        nameless = spec.memo["nameless"] = spec.with_batch(num_dims, spec.batch_size, (None,) * num_dims)
    return nameless.with_rows(num_rows)


def _find_moved_dims(selection: Selection, num_dims: int) -> tuple[int | None, ...] | None:
    """Returns the place of each batch dimension in the result, None if an integer removed it; or None if the selection
    is not that simple."""
    items = selection.items
    if not all(item is None or isinstance(item, (int, slice)) or getattr(item, "ndim", 0) == 1 for item in items):
        return None
    if sum(hasattr(item, "ndim") for item in items) > 1:
        return None
    moved: list[int | None] = []
    num_new = 0
    for item in (*items, *(slice(None),) * num_dims):
        if item is not None:
            moved.append(None if isinstance(item, int) else num_new)
        num_new += not isinstance(item, int)
    return tuple(moved[:num_dims])


def _select_numbers(selection: Selection, batch_size: tuple[int, ...]) -> tuple[Sequence[int], ...]:
    """Returns the selected numbers of each batch dimension, if no item covers several dimensions."""
    items = [item for item in selection.items if item is not None]
    found: list[Sequence[int]] = []
    for size, item in zip(batch_size, (*items, *(slice(None),) * len(batch_size)), strict=False):
        if isinstance(item, int):
            found.append((item,))
        elif isinstance(item, slice):
            found.append(range(*item.indices(size)))
        else:
            chosen: Any = item
            found.append(tuple((np.flatnonzero(chosen) if chosen.dtype == bool else chosen).tolist()))
    return tuple(found)


def write_layout(spec: Spec, *, is_packed: bool = False) -> Layout:
    """Returns the layout of a write: the leaves. Packed: in the order of a version's file."""
    return Layout.from_spec(spec, is_packed=is_packed)


def read_layout(spec: Spec, *, is_packed: bool = False) -> Layout:
    """Returns the layout of a read: the leaves, then the status. Packed: in the order of a version's file."""
    return Layout.from_spec(spec, (STATUS,), is_packed=is_packed)


def cut_values(nbytes: int) -> tuple[Message, ...]:
    """Cuts a block of values behind the leaves into messages; ``offset`` counts in the block."""
    starts = range(0, nbytes, MAX_MESSAGE_BYTES)
    return tuple(Message(start, min(MAX_MESSAGE_BYTES, nbytes - start), ()) for start in starts)


def write_messages(layout: Layout, values_nbytes: int, announced: Sequence[int]) -> tuple[Message, ...]:
    """Returns the messages of a write: those of its leaves, then those of its values.

    Raises:
        RemoteProtocolError: The sender has announced messages of other sizes.
    """
    num_values = len(announced) - len(layout.messages)
    if 0 <= values_nbytes <= max(num_values, 0) * MAX_MESSAGE_BYTES:  # checked first: that many would be made
        messages = (*layout.messages, *cut_values(values_nbytes))
        if [message.nbytes for message in messages] == list(announced):
            return messages
    nbytes = sum(layout.message_nbytes) + values_nbytes
    received = f"{len(announced)} messages of {sum(announced)} bytes"
    raise RemoteProtocolError(expected=f"messages of {nbytes} bytes", received=received)


def check_inline(content: control_pb2.Content, layout: Layout) -> None:
    """Raises RemoteProtocolError unless inline content has exactly the layout's length."""
    if content.values_nbytes:
        raise RemoteProtocolError(expected="values in the message, as the rest", received="values behind it")
    if len(content.inline) != sum(layout.message_nbytes):
        raise RemoteProtocolError(
            expected=f"{sum(layout.message_nbytes)} bytes of content", received=f"{len(content.inline)}"
        )


def make_rows_layout(spec: Spec, num_rows: int, added: tuple[str, ...] = ()) -> Layout:
    """Returns the layout of ``num_rows`` rows: the leaves, the rows' numbers and generations, added columns, then the
    status.

    Args:
        added: Keys of ``ADDED_DTYPES``.
    """
    rows = spec.with_rows(num_rows)
    layout: Layout | None = rows.memo.get(("rows_layout", added))
    if layout is None:
        names = {INDEX_KEY: "int64", GENERATION_KEY: "int64", **{name: ADDED_DTYPES[name] for name in added}}
        columns = (*(Trailing(name, dtype, (num_rows,)) for name, dtype in names.items()), STATUS)
        layout = rows.memo["rows_layout", added] = Layout.from_spec(rows, columns)
    return layout
