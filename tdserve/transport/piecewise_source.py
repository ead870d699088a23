"""A source of leaves that are read piece by piece as they leave: from a file, or from memory in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.layout import Message

Read = Callable[[int, int], NDArray[np.uint8]]
"""Bytes ``[start, stop)`` of a leaf, in C order."""


class ReadEnd:
    """Source: one leaf per slot. No more is in memory at a time than the messages that are under way.

    Args:
        leaves: The bytes of a leaf where they lie in memory, in C order; or what reads them.
    """

    def __init__(self, leaves: Sequence[NDArray[np.uint8] | Read]) -> None:
        self._leaves = leaves

    def direct(self, message: Message) -> torch.Tensor | None:
        part = message.parts[0]
        leaf = self._leaves[part.slot]
        if len(message.parts) > 1 or callable(leaf):
            return None
        return torch.from_numpy(leaf[part.start : part.stop])

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        """Raises InvalidRequestError where a leaf cannot be read."""
        target = staging.numpy()
        for slot, start, stop, offset in message.parts:
            leaf = self._leaves[slot]
            target[offset : offset + stop - start] = _read(leaf, start, stop) if callable(leaf) else leaf[start:stop]
        for start, stop in message.gaps:
            target[start:stop] = 0


def _read(read: Read, start: int, stop: int) -> NDArray[np.uint8]:
    try:
        return read(start, stop)
    except Exception as fault:  # whatever the library raises that reads the file
        reason = f"its content cannot be read any more: {fault!r}"[:300]
        raise InvalidRequestError(argument="tensordict", reason=reason) from fault
