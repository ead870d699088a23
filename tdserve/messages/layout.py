"""Byte positions: the place of every tensor leaf of a spec in one flat buffer, and the cut of that buffer into
messages.

Both ends of a transfer compute the same layout from the same spec, so no header travels with the bytes. Pure: no torch,
no I/O. ``proto/README.md`` §2.3 and §5 define the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf

ALIGNMENT_BYTES = 64
"""Every leaf starts at a multiple of this: one cache line, and enough for every dtype (complex128 needs 16)."""

LARGE_LEAF_BYTES = 1024 * 1024
"""A leaf of this size or more travels in messages of its own, so that both ends may use its memory in place; for a
smaller one, a copy at each end costs less than one more message."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""No message of leaves is longer: gloo reaches its full speed from 2 MiB on, and staging buffers stay near the cache.

Trailing columns all travel in the last message, whatever its length becomes."""

MAX_PACKED_BYTES = 2 * 1024 * 1024
"""The same limit for runs of small leaves of a version, one end of which is a file: leaves that are copied together for
the next message, or out of the last, are still in the cache (64 MiB in 2,000 leaves then take a sixth less,
measured)."""


@dataclass(frozen=True)
class Slot:
    """One leaf's place in the flat buffer. ``offset`` and ``nbytes`` in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension; the whole leaf if it has no dimension."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


class LeafPart(NamedTuple):
    """Bytes ``[start, stop)`` of slot number ``slot``, at ``offset`` in their message."""

    slot: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Message:
    """Bytes ``[offset, offset + nbytes)`` of the flat buffer, sent as one; those between parts are sent as zeros."""

    offset: int
    nbytes: int
    parts: tuple[LeafPart, ...]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The bytes between parts, as (start, stop). A sender that copies parts together zeroes them: staging memory
        has old content, perhaps of another client."""
        ends = [part.offset + part.stop - part.start for part in self.parts]
        starts = [part.offset for part in self.parts[1:]]
        return tuple((end, start) for end, start in zip(ends, starts, strict=False) if start > end)


@dataclass(frozen=True)
class Trailing:
    """A column that a transfer adds behind the leaves (such as row numbers); it always travels in the last message."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All slots in order, and the length of the flat buffer that holds them.

    Attributes:
        slots: The leaves in the spec's canonical order, but large ones behind small ones; then the trailing columns
            (their path is ``(name,)``).
        num_leaves: Number of slots that are leaves of the spec.
        nbytes: Length of the flat buffer, a multiple of 64.
        is_packed: Whether small leaves lie without gaps, those with the largest elements first, as in a version's file.
    """

    slots: tuple[Slot, ...]
    num_leaves: int
    nbytes: int
    is_packed: bool = False

    @classmethod
    def from_spec(cls, spec: Spec, trailing: tuple[Trailing, ...] = (), *, is_packed: bool = False) -> Layout:
        """Returns the layout of a spec; kept with the spec, since the same few structures move again and again."""
        key = ("layout", trailing, is_packed)
        layout = spec.memo.get(key)
        if layout is None:
            layout = spec.memo[key] = _build_layout(spec, trailing, is_packed)
        return layout

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Values that callers compute once per layout, by a key of theirs; they end with the layout."""
        return {}

    @cached_property
    def leaf_paths(self) -> tuple[Path, ...]:
        """Paths of the leaves, in the order of their slots."""
        return tuple(slot.path for slot in self.slots[: self.num_leaves])

    @cached_property
    def leaf_numbers(self) -> dict[Path, int]:
        """Numbers of the slots of leaves, by path."""
        return {path: number for number, path in enumerate(self.leaf_paths)}

    @cached_property
    def trailing_numbers(self) -> dict[str, int]:
        """Numbers of the slots of trailing columns, by name."""
        return {self.slots[number].path[0]: number for number in range(self.num_leaves, len(self.slots))}

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages: large leaves alone in pieces of at most 4 MiB, runs of small ones together; every leaf is
        covered once."""
        messages: list[Message] = []
        run: list[LeafPart] = []
        for number, slot in enumerate(self.slots):
            is_trailing = number >= self.num_leaves
            if slot.nbytes >= LARGE_LEAF_BYTES and not is_trailing:
                _close_run(messages, run, self.slots)
                messages.extend(_cut_large(number, slot))
                continue
            if run and _end(slot) - self.slots[run[0].slot].offset > self._max_run_bytes and not is_trailing:
                _close_run(messages, run, self.slots)
            if slot.nbytes:
                start = self.slots[run[0].slot].offset if run else slot.offset
                run.append(LeafPart(number, 0, slot.nbytes, slot.offset - start))
        _close_run(messages, run, self.slots)
        return tuple(messages)

    @property
    def _max_run_bytes(self) -> int:
        return MAX_PACKED_BYTES if self.is_packed else MAX_MESSAGE_BYTES

    @cached_property
    def message_nbytes(self) -> tuple[int, ...]:
        """The length of each message, in order."""
        return tuple(message.nbytes for message in self.messages)


def _end(slot: Slot) -> int:
    return slot.offset + slot.nbytes


def align(nbytes: int) -> int:
    """Rounds up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _build_layout(spec: Spec, trailing: tuple[Trailing, ...], is_packed: bool) -> Layout:
    slots: list[Slot] = []
    offset = 0
    # Small leaves are neighbours, so that they share messages.
    leaves = sorted(spec.tensors, key=lambda item: _get_sort_key(item[1], is_packed))
    columns: list[tuple[Path, str, Sequence[int]]] = [(path, leaf.dtype, leaf.shape) for path, leaf in leaves]
    columns += [((column.name,), column.dtype, column.shape) for column in trailing]
    for number, (path, dtype, shape) in enumerate(columns):
        nbytes = ITEMSIZE[dtype] * prod(shape)
        if not is_packed or nbytes >= LARGE_LEAF_BYTES or number >= len(leaves):
            offset = align(offset)
        slots.append(Slot(path, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    return Layout(tuple(slots), len(spec.tensors), align(offset), is_packed)


def _get_sort_key(leaf: TensorLeaf, is_packed: bool) -> tuple[bool, int]:
    """Returns the sort key of a leaf; leaves of equal rank keep the canonical order."""
    return leaf.nbytes >= LARGE_LEAF_BYTES, -ITEMSIZE[leaf.dtype] if is_packed else 0


def _close_run(messages: list[Message], run: list[LeafPart], slots: tuple[Slot, ...]) -> None:
    if run:
        first, last = slots[run[0].slot], slots[run[-1].slot]
        messages.append(Message(first.offset, _end(last) - first.offset, tuple(run)))
    run.clear()


def _cut_large(number: int, slot: Slot) -> list[Message]:
    """Cuts one large leaf into pieces of about equal length, between rows if a row fits into a message."""
    num_pieces = -(-slot.nbytes // MAX_MESSAGE_BYTES)
    unit = slot.row_nbytes if slot.row_nbytes <= MAX_MESSAGE_BYTES else ALIGNMENT_BYTES
    num_units = -(-slot.nbytes // unit)
    units_per_piece = min(-(-num_units // num_pieces), max(1, MAX_MESSAGE_BYTES // unit))
    step = units_per_piece * unit
    return [
        Message(
            slot.offset + start,
            min(step, slot.nbytes - start),
            (LeafPart(number, start, min(start + step, slot.nbytes), 0),),
        )
        for start in range(0, slot.nbytes, step)
    ]
