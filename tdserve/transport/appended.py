"""A block of values that follows the leaves of a transfer, in messages of its own.

``messages.content.cut_values`` cuts it. Its messages have no parts, unlike those of a layout.
"""

from __future__ import annotations

import numpy as np
import torch

from tdserve.messages.layout import Message
from tdserve.transport.sources_sinks import Sink, Source


class BytesEnd:
    """A source: a block of values in memory.

    Args:
        content: The block; offsets of messages count from its start.
    """

    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content, np.uint8)

    def find_memory(self, message: Message) -> None:
        """Returns None: the bytes of a Python object must not be written to, which torch cannot promise."""
        return

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        np.copyto(staging.numpy(), self._content[message.offset : message.offset + message.nbytes])


class SourceBehind:
    """A source: leaves, and a block of values behind them."""

    def __init__(self, leaves: Source, values: Source) -> None:
        self._leaves = leaves
        self._values = values

    def find_memory(self, message: Message) -> torch.Tensor | None:
        return (self._leaves if message.parts else self._values).find_memory(message)

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        (self._leaves if message.parts else self._values).fill(message, staging)


class SinkBehind:
    """A sink: leaves, and a block of values behind them."""

    def __init__(self, leaves: Sink, values: Sink) -> None:
        self._leaves = leaves
        self._values = values

    def find_memory(self, message: Message) -> torch.Tensor | None:
        return (self._leaves if message.parts else self._values).find_memory(message)

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        (self._leaves if message.parts else self._values).drain(message, staging)
