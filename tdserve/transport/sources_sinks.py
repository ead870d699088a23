"""Sources and sinks of messages: leaves, rows of mapped leaves, flat buffers.

A *source* provides the bytes of a message, a *sink* takes them. Either may offer its own memory (``find_memory``), so
that bytes are sent from, or received into, their place. Otherwise they pass through a staging buffer (``fill``,
``drain``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.messages.layout import ALIGNMENT_BYTES, Layout, LeafPart, Message
from tdserve.structure.tensors.torch_types import view_bytes


class Source(Protocol):
    """Provides the content of messages, in order."""

    def find_memory(self, message: Message) -> torch.Tensor | None:
        """Returns the message's bytes in place, uint8 ``[message.nbytes]``; None if they have to be copied together."""

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the message's bytes into ``staging``, uint8 ``[message.nbytes]``, completely; ``gaps`` become
        zeros."""


class Sink(Protocol):
    """Takes the content of messages, in order."""

    def find_memory(self, message: Message) -> torch.Tensor | None:
        """Returns the place of the message's bytes, uint8 ``[message.nbytes]``; None if they have to be distributed."""

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the message's bytes from ``staging`` to their places."""


def copy_bytes(target: torch.Tensor, content: torch.Tensor) -> None:
    """Copies one-dimensional uint8 tensors of equal length.

    It uses NumPy, in the calling thread: torch's own copy spreads half a megabyte over all cores, and takes a hundred
    times longer if one of them is busy (measured).
    """
    np.copyto(target.numpy(), content.numpy())


def copy_together(pieces: Iterator[NDArray[np.uint8]], target: NDArray[np.uint8]) -> None:
    """Copies pieces of bytes one behind the other, a few at a time.

    A piece may be a view that is made for it. Hundreds that live together would set off the garbage collector, which
    takes longer than the copy.
    """
    at = 0
    while some := list(islice(pieces, _MAX_PIECES)):
        end = at + sum(map(len, some))
        np.concatenate(some, out=target[at:end])
        at = end


def clear_gaps(message: Message, target: NDArray[np.uint8]) -> None:
    """Writes zeros between the parts of a message."""
    for start, stop in message.gaps:
        target[start:stop] = 0


class FlatBuffer:
    """A source and sink: the flat buffer of a layout itself."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def find_memory(self, message: Message) -> torch.Tensor:
        return self._buffer[message.offset : message.offset + message.nbytes]

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        copy_bytes(staging, self.find_memory(message))

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        copy_bytes(self.find_memory(message), staging)


Trailer = Callable[[], Sequence[NDArray[Any]]]
"""Makes the trailing columns after everything before them was copied; this is the place to check that no row
is torn."""


class TrailingColumns:
    """The trailing columns of a layout, made when the first of them is filled."""

    def __init__(self, layout: Layout, trailer: Trailer | None) -> None:
        self._num_leaves = layout.num_leaves
        self._trailer = trailer
        self._columns: list[NDArray[np.uint8]] | None = None

    def get_column(self, slot: int) -> NDArray[np.uint8]:
        """Returns the bytes of a slot behind the leaves."""
        if self._columns is None:
            self._columns = [column.view(np.uint8) for column in self._trailer()] if self._trailer else []
        return self._columns[slot - self._num_leaves]


_MAX_PIECES = 32
"""A call costs as much as copying half a dozen small pieces."""

_PADDING: NDArray[np.uint8] = np.zeros(ALIGNMENT_BYTES, np.uint8)


class LeafBuffers:
    """A source and sink: one contiguous tensor per slot, used in place if a message lies inside one of them.

    Bytes are NumPy views: for two thousand small leaves, slicing tensors costs more than copying them.
    Received bytes are copied through memory views, which takes a quarter less than NumPy's assignment for leaves of 32
    KiB (measured).

    Args:
        tensors: One per leaf (and, for a sink, per trailing column) of the layout, contiguous, on CPU, of the slot's
            dtype and shape.
        trailing: The layout's trailing columns; for a source only.
        contents: The bytes of the first tensors, if they are already known, or made when they are needed.
        targets: Targets of the first tensors as memory views, if they already exist; for a sink only.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        trailing: TrailingColumns | None = None,
        *,
        contents: Sequence[NDArray[np.uint8]] = (),
        targets: Sequence[memoryview] = (),
    ) -> None:
        self._tensors = tensors
        self._contents = contents
        self._others = [view_bytes(tensor).numpy() for tensor in tensors[len(contents) :]]
        self._targets = targets
        self._trailing = trailing

    def _get_bytes(self, slot: int) -> NDArray[np.uint8]:
        num_known = len(self._contents)
        return self._contents[slot] if slot < num_known else self._others[slot - num_known]

    def find_memory(self, message: Message) -> torch.Tensor | None:
        if message.parts[-1].slot >= len(self._tensors):
            return None
        if len(message.parts) > 1:
            # The gaps of such a run belong to other data: they must not be sent or overwritten.
            return None if message.gaps else self._run(message)
        part = message.parts[0]
        return torch.from_numpy(self._get_bytes(part.slot)[part.start : part.stop])

    def _run(self, message: Message) -> torch.Tensor | None:
        """Returns the memory of several leaves that lie in one storage exactly as in the message, as in a file of
        packed leaves."""
        first = message.parts[0]
        storage = self._tensors[first.slot].untyped_storage()
        begin = self._tensors[first.slot].data_ptr() + first.start - first.offset
        end = storage.data_ptr() + storage.nbytes()
        for slot, start, _, offset in message.parts:
            if self._tensors[slot].data_ptr() + start != begin + offset:
                return None
        # Excludes tensors in different storages that are neighbours by chance.
        if begin < storage.data_ptr() or begin + message.nbytes > end:
            return None
        run = torch.empty(0, dtype=torch.uint8)
        return run.set_(storage, begin - storage.data_ptr(), (message.nbytes,))  # type: ignore[call-overload,no-any-return]

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        copy_together(self._iter_pieces(message), staging.numpy())

    def _iter_pieces(self, message: Message) -> Iterator[NDArray[np.uint8]]:
        at = 0
        for slot, start, stop, offset in message.parts:
            if offset > at:
                yield _PADDING[: offset - at]
            if slot < len(self._tensors):
                content = self._get_bytes(slot)
                yield content if stop - start == len(content) else content[start:stop]
            elif self._trailing is not None:
                yield self._trailing.get_column(slot)
            at = offset + stop - start

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        targets = self._targets
        content = staging.numpy().data
        for slot, start, stop, offset in message.parts:
            target = targets[slot] if slot < len(targets) else self._get_bytes(slot).data
            if stop - start != len(target):
                target = target[start:stop]
            target[:] = content[offset : offset + stop - start]


class JoinedSource:
    """A source: the rows of several tensordicts of one structure, concatenated.

    Args:
        pieces: For each slot, the bytes of each tensordict.
    """

    def __init__(self, pieces: Sequence[Sequence[NDArray[np.uint8]]]) -> None:
        self._pieces = pieces

    def find_memory(self, message: Message) -> torch.Tensor | None:
        if len(message.parts) > 1:
            return None
        pieces = self._get_bytes(message.parts[0])
        return torch.from_numpy(pieces[0]) if len(pieces) == 1 else None

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        copy_together(self._iter_pieces(message), staging.numpy())

    def _iter_pieces(self, message: Message) -> Iterator[NDArray[np.uint8]]:
        at = 0
        for part in message.parts:
            if part.offset > at:
                yield _PADDING[: part.offset - at]
            yield from self._get_bytes(part)
            at = part.offset + part.stop - part.start

    def _get_bytes(self, part: LeafPart) -> list[NDArray[np.uint8]]:
        found, at = [], 0
        for piece in self._pieces[part.slot]:
            first, end = max(part.start - at, 0), min(part.stop - at, len(piece))
            if first < end:
                found.append(piece[first:end])
            at += len(piece)
        return found


class IndexedSource:
    """A source: every leaf under an index expression, made one leaf at a time and then released.

    Args:
        layout: Layout of the result.
        take: Returns the tensor of a slot, of the slot's shape; a view if the index is basic.
        trailing: As in ``RowBuffers``.
    """

    def __init__(self, layout: Layout, take: Callable[[int], torch.Tensor], trailing: Trailer | None = None) -> None:
        self._layout = layout
        self._take = take
        self._trailing = TrailingColumns(layout, trailing)
        self._slot = -1
        self._content = torch.empty(0, dtype=torch.uint8)

    def find_memory(self, message: Message) -> torch.Tensor | None:
        part = message.parts[0]
        if len(message.parts) != 1 or part.slot >= self._layout.num_leaves:
            return None
        return self._get_leaf(part.slot)[part.start : part.stop]

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        target = staging.numpy()
        for slot, start, stop, offset in message.parts:
            is_leaf = slot < self._layout.num_leaves
            target[offset : offset + stop - start] = (
                self._get_leaf(slot)[start:stop].numpy() if is_leaf else self._trailing.get_column(slot)
            )
        clear_gaps(message, target)

    def _get_leaf(self, slot: int) -> torch.Tensor:
        if slot != self._slot:
            self._content = view_bytes(self._take(slot).contiguous())
            self._slot = slot
        return self._content


class RowBuffers:
    """A source and sink: selected rows of larger leaves, such as a ring's mapped files.

    NumPy copies the rows: torch's ``index_select`` takes four times as long for 256 rows of 700 bytes (measured).

    Args:
        layout: Layout of the rows that move: slot ``i`` has shape ``[num_rows, *row]``.
        tables: One per leaf of the layout: the bytes of its rows, uint8 ``[capacity, row_nbytes]``, contiguous.
        rows: int64 ``[num_rows]``: row ``i`` of the content is row ``rows[i]`` of the leaves.
        trailing: Returns the layout's trailing columns; called once, after all leaves were copied.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[NDArray[np.uint8]],
        rows: NDArray[np.int64],
        trailing: Trailer | None = None,
    ) -> None:
        self._layout = layout
        self._tables = tables
        self._rows = rows
        self._trailing = TrailingColumns(layout, trailing)
        num_rows = len(rows)
        self._first = int(rows[0]) if num_rows else 0
        is_dense = num_rows > 0 and int(rows[-1]) - self._first == num_rows - 1
        self._is_run = is_dense and bool((rows[1:] > rows[:-1]).all())

    def get_trailing(self, slot: int) -> NDArray[np.uint8]:
        """Returns the bytes of a slot behind the leaves, which must have been copied before."""
        return self._trailing.get_column(slot)

    def make_copies(self, buffer: NDArray[np.uint8], piece_nbytes: int) -> list[Callable[[], None]]:
        """Returns copies of all leaves to a buffer of the whole layout, of about ``piece_nbytes`` each; they may run in
        any order."""
        found: list[Callable[[], None]] = []
        for number, slot in enumerate(self._layout.slots[: self._layout.num_leaves]):
            row_nbytes = self._tables[number].shape[1]
            step = max(piece_nbytes // max(row_nbytes, 1), 1) * row_nbytes
            for start in range(0, slot.nbytes, step) if step else ():
                stop = min(start + step, slot.nbytes)
                target = buffer[slot.offset + start : slot.offset + stop]
                found.append(partial(self.gather, LeafPart(number, start, stop, 0), target))
        return found

    def find_memory(self, message: Message) -> torch.Tensor | None:
        if not self._is_run or len(message.parts) != 1 or message.parts[0].slot >= self._layout.num_leaves:
            return None
        return torch.from_numpy(self._run(message.parts[0]))

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        target = staging.numpy()
        for part in message.parts:
            piece = target[part.offset : part.offset + part.stop - part.start]
            if part.slot >= self._layout.num_leaves:
                piece[:] = self._trailing.get_column(part.slot)
            else:
                self.gather(part, piece)
        clear_gaps(message, target)

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        content = staging.numpy()
        for part in message.parts:
            self.scatter(part, content[part.offset : part.offset + part.stop - part.start])

    def _run(self, part: LeafPart) -> NDArray[np.uint8]:
        """Returns the bytes of a part if they are contiguous."""
        table = self._tables[part.slot]
        start = self._first * table.shape[1]
        return table.reshape(-1)[start + part.start : start + part.stop]

    def gather(self, part: LeafPart, target: NDArray[np.uint8]) -> None:
        """Copies a part of a message out of the rows."""
        table, rows = self._tables[part.slot], self._rows
        row_nbytes = table.shape[1]
        first, offset = divmod(part.start, row_nbytes)
        last, rest = divmod(part.stop, row_nbytes)
        if self._is_run:
            target[:] = self._run(part)
        elif offset or rest:  # a message boundary inside a row: rows longer than a message
            at = 0
            for position, begin, end in _split_spans(row_nbytes, part):
                target[at : at + end - begin] = table[rows[position], begin:end]
                at += end - begin
        else:  # "clip" copies straight into ``out``; control guarantees that every row is in range
            table.take(rows[first:last], axis=0, out=target.reshape(last - first, row_nbytes), mode="clip")

    def scatter(self, part: LeafPart, content: NDArray[np.uint8]) -> None:
        """Copies a part of a message into the rows."""
        table, rows = self._tables[part.slot], self._rows
        row_nbytes = table.shape[1]
        first, offset = divmod(part.start, row_nbytes)
        last, rest = divmod(part.stop, row_nbytes)
        if self._is_run:
            self._run(part)[:] = content
        elif offset or rest:
            at = 0
            for position, begin, end in _split_spans(row_nbytes, part):
                table[rows[position], begin:end] = content[at : at + end - begin]
                at += end - begin
        else:
            table[rows[first:last]] = content.reshape(last - first, row_nbytes)


def view_rows(leaf: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of a contiguous leaf by rows, uint8 ``[num_rows, row_nbytes]``, shared."""
    flat: NDArray[np.uint8] = view_bytes(leaf).numpy()
    return flat.reshape(len(leaf), -1) if len(leaf) else flat.reshape(0, 0)


def _split_spans(row_nbytes: int, part: LeafPart) -> list[tuple[int, int, int]]:
    """Cuts a byte range into (position of the row, first byte, end byte) per row that it touches."""
    spans, at = [], part.start
    while at < part.stop:
        position, first = divmod(at, row_nbytes)
        end = min(row_nbytes, first + part.stop - at)
        spans.append((position, first, end))
        at += end - first
    return spans
