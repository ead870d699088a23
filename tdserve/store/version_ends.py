"""A version's file as one end of a transfer: messages lie in it as they travel, or nearly so.

Made out by positions, once for a structure: to make a view of every leaf of two thousand takes longer than to move
thirty megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.messages.layout import Layout, Message
from tdserve.store.version_format import layout_of
from tdserve.structure.tree import Spec


class _Span(NamedTuple):
    """Bytes of neighbouring leaves, which lie in one piece in the file and in a message.

    Attributes:
        begin, end: In the file.
        offset: In the message.
    """

    begin: int
    end: int
    offset: int


_Positions = dict[int, list[_Span]]
"""The leaves of every message, by its offset in the layout."""


class VersionEnd:
    """Source and sink.

    Args:
        content: The bytes of all leaves, as ``VersionFile.content``.
        spec: Of the file.
        sent: Of what travels: the same, or some of its leaves.
        layout: Of that.
        trailing: Of a source: gives the bytes of a slot behind the leaves.
    """

    def __init__(
        self,
        content: NDArray[np.uint8],
        spec: Spec,
        sent: Spec,
        layout: Layout,
        trailing: Callable[[int], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._content = content
        self._num_leaves = layout.num_leaves
        self._trailing = trailing
        key = ("store.version_ends", len(layout.slots))
        positions: _Positions | None = sent.memo.get(key)
        if positions is None:
            positions = sent.memo[key] = _positions(spec, layout)
        self._positions = positions

    def direct(self, message: Message) -> torch.Tensor | None:
        """The file's own memory, where the message lies in it as a whole."""
        spans = self._positions[message.offset]
        if len(spans) != 1 or spans[0].end - spans[0].begin != message.nbytes:
            return None
        return torch.from_numpy(self._content[spans[0].begin : spans[0].end])

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the parts of a message together."""
        target = staging.numpy()
        for begin, end, at in self._positions[message.offset]:
            target[at : at + end - begin] = self._content[begin:end]
        for slot, start, stop, offset in reversed(message.parts):
            if slot < self._num_leaves:
                break
            if self._trailing is not None:
                target[offset : offset + stop - start] = self._trailing(slot)
        for start, stop in message.gaps:
            target[start:stop] = 0

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the parts of a message to their places."""
        found = staging.numpy()
        for begin, end, at in self._positions[message.offset]:
            self._content[begin:end] = found[at : at + end - begin]


def _positions(spec: Spec, layout: Layout) -> _Positions:
    offsets = layout_of(spec).offsets
    starts = [offsets[slot.path] for slot in layout.slots[: layout.num_leaves]]
    return {message.offset: [*_spans(message, starts)] for message in layout.messages}


def _spans(message: Message, starts: list[int]) -> Iterator[_Span]:
    """Where the leaves of a message lie, neighbours taken together.

    Args:
        starts: Where each leaf begins in the file.
    """
    last: _Span | None = None
    for slot, start, stop, offset in message.parts:
        if slot >= len(starts):
            break
        begin, end = starts[slot] + start, starts[slot] + stop
        if last is not None and last.end == begin and last.offset + last.end - last.begin == offset:
            last = last._replace(end=end)
            continue
        if last is not None:
            yield last
        last = _Span(begin, end, offset)
    if last is not None:
        yield last
