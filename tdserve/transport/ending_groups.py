"""Groups that are being ended, and the memory that they may still write.

Aborting a group may take as long as its kernels do, or for ever. The thread that closes a group does not wait that
long, but memory that a kernel may still write must not be reused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock, Thread, current_thread

_log = logging.getLogger("tdserve.transport")


class EndingGroups:
    """Ends groups, each in a thread of its own, and keeps their memory meanwhile. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[Thread, object] = {}
        self._lost: list[object] = []  # memory that a kernel may still write; it is unknown whether one will

    @property
    def num_ending(self) -> int:
        """Number of groups that have not ended yet. For tests."""
        return len(self._kept)

    def end_in_thread(
        self, end: Callable[[], None], *, keeps: object, name: str, on_ended: Callable[[], None] | None = None
    ) -> Thread:
        """Starts to end a group.

        Args:
            end: Returns when no kernel of the group runs any more. If it raises, the memory is never reused.
            keeps: Memory that its kernels may write; released when ``end`` has returned, and never if it raises.
            name: Name of the thread.
            on_ended: Called after that; gives memory back.

        Returns:
            The thread, which ends after that.
        """

        def run() -> None:
            try:
                end()
            except Exception:  # noqa: BLE001 (outermost frame of the thread)
                with self._lock:
                    self._lost.append(keeps)
                _log.warning("%s: it did not end as it should; its memory is not used again", name, exc_info=True)
            else:
                if on_ended is not None:
                    on_ended()
            finally:
                with self._lock:
                    self._kept.pop(current_thread(), None)

        thread = Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._kept[thread] = keeps
        thread.start()
        return thread

    def join(self, timeout_s: float) -> bool:
        """Waits until all groups have ended; returns whether they have."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._kept)
        for thread in threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)


ENDING_GROUPS = EndingGroups()
"""The groups that this process is ending."""
