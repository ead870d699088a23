"""Staging memory for wires between GPUs: made once per process and GPU, and used by one wire after the other.

Pinning memory, and allocating or freeing it on a GPU, may wait for every kernel that runs there. A kernel that waits
for a stopped client runs as long as a transfer may take. So nothing is allocated or freed while sessions come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

import torch

from tdserve.base.errors import CapacityError


@dataclass(frozen=True)
class StagingSlot:
    """Staging memory of one piece.

    Attributes:
        pinned: Memory of the host; a GPU copies from and to it by itself.
        gpu: Memory of the GPU.
    """

    pinned: torch.Tensor
    gpu: torch.Tensor


class StagingPool:
    """Sets of slots, one set per wire. Threads: safe.

    Args:
        make: Makes a slot.
        what: Name of the memory, for errors.
        set_size: Slots per set.
        num_ready: Sets that are made now.
        max_sets: Most sets; those beyond ``num_ready`` are made when they are needed, and kept.

    Raises:
        RuntimeError: What ``make`` raises.
    """

    def __init__(
        self, make: Callable[[], StagingSlot], *, what: str, set_size: int, num_ready: int = 1, max_sets: int = 16
    ) -> None:
        self._make = make
        self._what = what
        self._set_size = set_size
        self._max_sets = max_sets
        self._changed = Condition()
        self._num_made = 0
        self._free: list[Sequence[StagingSlot]] = []
        self.prepare(num_ready)

    @property
    def num_free(self) -> int:
        """Number of sets that exist and that no wire has."""
        return len(self._free)

    def prepare(self, num_ready: int) -> None:
        """Makes sets until there are ``num_ready``, free or not. Raises what ``make`` raises."""
        while self._may_make(min(num_ready, self._max_sets)):
            self.give_back(self._make_set())

    def take(self, timeout_s: float) -> Sequence[StagingSlot]:
        """Returns a set for one wire; if all are taken, waits for one that is given back.

        Raises:
            CapacityError: None was given back in time.
            RuntimeError: What ``make`` raises.
        """
        with self._changed:
            if self._free:
                return self._free.pop()
        if self._may_make(self._max_sets):
            return self._make_set()
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                raise CapacityError(what=f"sets of {self._what}, of which {self._num_made} are in use", asked=1, free=0)
            return self._free.pop()

    def give_back(self, slots: Sequence[StagingSlot]) -> None:
        """Takes a set back, which no kernel may write any more."""
        with self._changed:
            self._free.append(slots)
            self._changed.notify()

    def _may_make(self, limit: int) -> bool:
        """Counts one more set, unless there are ``limit``."""
        with self._changed:
            if self._num_made >= limit:
                return False
            self._num_made += 1
            return True

    def _make_set(self) -> Sequence[StagingSlot]:
        try:
            return [self._make() for _ in range(self._set_size)]
        except BaseException:
            with self._changed:
                self._num_made -= 1
            raise
