"""The structures that a data worker already has, which orders need not include."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.structure.trees.tree import Spec

MAX_LEAVES = 1 << 14
"""Most leaves of all structures together. When there are more, the worker forgets them: stores and versions come and
go, each perhaps with its own structure. In the worker, a leaf takes a kilobyte and more with all that is derived from
the structure, and waiting orders may keep as many again: 40 MB at most."""

_LEAVES_APART = 256
"""Leaves that a structure counts for besides its own, so that there are 64 structures at most. A small one takes 40 KB
too (measured), and a worker that meets many is soon as large as it gets. One that uses more of them in turn is sent
each of them again, which takes 0.1 ms."""


class WorkerSpecCache:
    """The fingerprints of one worker's structures.

    Args:
        forget: Makes the worker forget its structures, except those that it got since the previous call.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._included: set[bytes] = set()
        self._num_leaves = 0

    def __len__(self) -> int:
        return len(self._included)

    def must_include(self, spec: Spec) -> bool:
        """Returns whether an order that names this structure has to include it; counts it as included from then on."""
        if spec.fingerprint in self._included:
            return False
        num_leaves = len(spec.tensors) + len(spec.values) + _LEAVES_APART
        if self._included and self._num_leaves + num_leaves > MAX_LEAVES:
            self.clear()
            self._forget()
        self._included.add(spec.fingerprint)
        self._num_leaves += num_leaves
        return True

    def clear(self) -> None:
        """Forgets all of them: the worker is another process, and has none."""
        self._included.clear()
        self._num_leaves = 0
