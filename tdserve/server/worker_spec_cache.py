"""Which structures a data worker was told of, and need not be told again."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.structure.tree import Spec

MAX_LEAVES = 1 << 16
"""Of all structures together; then the worker forgets them: stores and versions come and go, each perhaps with a
structure of its own. A leaf takes it about a kilobyte (measured), with all that it derives from the structure, and it
keeps as many again for orders that wait."""

_LEAVES_APART = 8
"""So many leaves a structure counts for beside its own."""


class WorkerSpecCache:
    """The fingerprints of one worker's structures.

    Args:
        forget: Has the worker forget what it was told before the last time, which it is when this returns.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._told: set[bytes] = set()
        self._num_leaves = 0

    def __len__(self) -> int:
        return len(self._told)

    def must_tell(self, spec: Spec) -> bool:
        """Whether an order that names this structure has to bring it along; it does so then."""
        if spec.fingerprint in self._told:
            return False
        num_leaves = len(spec.tensors) + len(spec.values) + _LEAVES_APART
        if self._told and self._num_leaves + num_leaves > MAX_LEAVES:
            self.clear()
            self._forget()
        self._told.add(spec.fingerprint)
        self._num_leaves += num_leaves
        return True

    def clear(self) -> None:
        """The worker knows of none: it is another process."""
        self._told.clear()
        self._num_leaves = 0
