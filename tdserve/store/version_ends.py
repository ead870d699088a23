"""A version's file as one end of a transfer: messages lie in it as they travel, or nearly so.

Made out by positions, once for a structure: to make a view of every leaf of two thousand takes longer than to move
thirty megabytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.layout import Layout, Message
from tdserve.spec.tree import Spec
from tdserve.store.version_format import layout_of

_Positions = tuple[list[int], dict[int, int]]


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
        self._starts, self._runs = positions

    def direct(self, message: Message) -> torch.Tensor | None:
        """The file's own memory, where the message lies in it as a whole."""
        start = self._runs.get(message.offset)
        return None if start is None else torch.from_numpy(self._content[start : start + message.nbytes])

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the parts of a message together."""
        target = staging.numpy()
        for slot, start, stop, offset in message.parts:
            piece = target[offset : offset + stop - start]
            if slot < self._num_leaves:
                at = self._starts[slot]
                piece[:] = self._content[at + start : at + stop]
            elif self._trailing is not None:
                piece[:] = self._trailing(slot)

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        """Copies the parts of a message to their places."""
        found = staging.numpy()
        for slot, start, stop, offset in message.parts:
            at = self._starts[slot]
            self._content[at + start : at + stop] = found[offset : offset + stop - start]


def _positions(spec: Spec, layout: Layout) -> _Positions:
    """Where each leaf begins in the file, and each message that lies in one piece, by its offset in the layout."""
    offsets = layout_of(spec).offsets
    starts = [offsets[slot.path] for slot in layout.slots[: layout.num_leaves]]
    runs: dict[int, int] = {}
    for message in layout.messages:
        first = message.parts[0]
        if message.parts[-1].slot >= layout.num_leaves:
            continue
        begin = starts[first.slot] + first.start - first.offset
        if all(starts[part.slot] + part.start == begin + part.offset for part in message.parts):
            runs[message.offset] = begin
    return starts, runs
