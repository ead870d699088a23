"""A version's file as source or sink of a transfer: messages have the same layout as the file, or nearly so.

Positions are computed once per structure: making a view of each of two thousand leaves takes longer than moving thirty
megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.messages.layout import Layout, Message
from tdserve.store.weights.version_format import make_layout
from tdserve.structure.trees.tree import Spec


class _Span(NamedTuple):
    """Bytes of neighbouring leaves that are contiguous in the file and in a message.

    Attributes:
        begin, end: Positions in the file.
        offset: Position in the message.
    """

    begin: int
    end: int
    offset: int


_Positions = dict[int, list[_Span]]
"""The leaves of every message, by the message's offset in the layout."""


class VersionEnd:
    """A source and sink: the content of a version's file.

    Args:
        content: The bytes of all leaves, ``VersionFile.content``.
        spec: Structure of the file.
        sent: Structure of what travels: the same, or some of its leaves.
        layout: Layout of that.
        trailing: For a source: returns the bytes of a slot behind the leaves.
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
        key = ("store.weights.version_ends", len(layout.slots))
        positions: _Positions | None = sent.memo.get(key)
        if positions is None:
            positions = sent.memo[key] = _find_positions(spec, layout)
        self._positions = positions

    def find_memory(self, message: Message) -> torch.Tensor | None:
        """Returns the file's own memory if it has the whole message in one piece."""
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


def _find_positions(spec: Spec, layout: Layout) -> _Positions:
    offsets = make_layout(spec).offsets
    starts = [offsets[slot.path] for slot in layout.slots[: layout.num_leaves]]
    return {message.offset: [*_split_spans(message, starts)] for message in layout.messages}


def _split_spans(message: Message, starts: list[int]) -> Iterator[_Span]:
    """Returns the places of the leaves of a message, with neighbours merged.

    Args:
        starts: Start of each leaf in the file.
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
