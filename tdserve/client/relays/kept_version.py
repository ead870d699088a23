"""A version of weights that a client keeps to pass it on, while it is received and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

import numpy as np
import torch

from tdserve.base.errors import PeerLostError
from tdserve.messages.layout import Layout
from tdserve.store.weights.version_checksums import DTYPE, compute_leaf_checksum
from tdserve.structure.trees.tree import Spec


class KeptVersion:
    """The bytes of one version, as a private copy that the user cannot change.

    Threads: one fills it, any number wait for what has arrived.

    Args:
        layout: Layout of what is sent.
        buffer: Flat, uint8 ``[layout.nbytes]``.
        on_first: Called when the first message has arrived, in the thread that fills it.

    Attributes:
        layout, buffer: As given.
    """

    def __init__(self, layout: Layout, buffer: torch.Tensor, *, on_first: Callable[[], None] = lambda: None) -> None:
        self.layout = layout
        self.buffer = buffer
        self._on_first = on_first
        self._changed = Condition()
        self._num_here = 0
        self._is_dropped = False

    @property
    def num_here(self) -> int:
        """Messages of the layout that have arrived, from the first on."""
        return self._num_here

    def add_arrived(self, count: int) -> None:
        """Adds messages that have arrived."""
        with self._changed:
            is_first = not self._num_here
            self._num_here += count
            self._changed.notify_all()
        if is_first:
            self._on_first()

    def drop(self) -> None:
        """Stops passing it on, because the rest will not come, or the bytes are wrong."""
        with self._changed:
            self._is_dropped = True
            self._changed.notify_all()

    def wait(self, number: int, timeout_s: float) -> None:
        """Waits until a message has arrived.

        Raises:
            PeerLostError: It will not arrive, or has not within ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_dropped or self._num_here > number, max(end - time.monotonic(), 0))
            if self._is_dropped or self._num_here <= number:
                raise PeerLostError(peer="the relay before", reason=f"message {number} of a version did not arrive")


def compute_checksums(layout: Layout, buffer: torch.Tensor, spec: Spec) -> bytes:
    """Returns the checksums of the leaves of a version in canonical order, as control has them.

    Args:
        layout: Layout of what was sent.
        buffer: Flat, as its messages filled it.
        spec: Its structure.
    """
    content = buffer.numpy()
    found = {
        slot.path: compute_leaf_checksum(content[slot.offset : slot.offset + slot.nbytes])
        for slot in layout.slots[: layout.num_leaves]
    }
    return np.array([found[path] for path, _ in spec.tensors], DTYPE).tobytes()
