"""Keeps changes of a module's weights out of its forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any
from weakref import WeakSet

from torch import nn


class ForwardGuard:
    """A lock that a module holds during each forward pass. Threads: safe.

    A deep copy of a guarded module has the same guard, and so its passes wait for the same changes; a pickled one
    has a guard of its own.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._guarded: WeakSet[nn.Module] = WeakSet()
        self._of_thread = local()

    def guard(self, module: object) -> None:
        """Makes the passes of a module hold the lock. Idempotent; what is no module is not called like one."""
        if isinstance(module, nn.Module) and module not in self._guarded:
            self._guarded.add(module)
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, always_call=True)

    @contextmanager
    def change(self) -> Iterator[None]:
        """No pass of a guarded module is under way in other threads during the block."""
        with self._lock:
            yield

    def _begin(self, *_: Any) -> None:
        self._lock.acquire()
        self._of_thread.num_passes = getattr(self._of_thread, "num_passes", 0) + 1

    def _end(self, *_: Any) -> None:
        if getattr(self._of_thread, "num_passes", 0):  # else the pass began before the module was guarded
            self._of_thread.num_passes -= 1
            self._lock.release()

    def __deepcopy__(self, _: Any) -> ForwardGuard:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardGuard, ()
