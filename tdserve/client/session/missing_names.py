"""Names of stores that do not exist: whoever waits for one is told soon, and which names are near."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from threading import Lock, Timer

from tdserve.base.errors import StoreNotCreatedError, TDServeError

LOOK_AFTER_S = 1.0
"""Into a wait: processes may start in any order, and most stores are there by then."""

WARN_AGAIN_S = 60.0
"""Between two warnings of one name."""

MAX_WARNED = 256
"""Names that are remembered for that."""

NUM_AROUND = 200
"""Names that are looked through: the nearest in the order of names, among however many there are."""

MAX_NEAR = 3

_log = logging.getLogger("tdserve.client")


class MissingNames:
    """Of one client. Threads: safe.

    Args:
        ask: Gives, of the server's names, so many around one, itself included.
    """

    def __init__(self, ask: Callable[[str, int], Sequence[str]]) -> None:
        self._ask = ask
        self._lock = Lock()
        self._warned_s: dict[str, float] = {}

    def find_near(self, name: str) -> list[str] | None:
        """Names that are like one which does not exist; None where it does.

        Raises:
            TDServeError: The server cannot say.
        """
        names = self._ask(name, NUM_AROUND)
        return None if name in names else get_close_matches(name, names, n=MAX_NEAR)

    def warn(self, name: str) -> None:
        """Logs that a store does not exist, if that is so, for somebody who waits for it; raises nothing."""
        with suppress(TDServeError):
            near = self.find_near(name)
            if near is not None and self._may_warn(name):
                _log.warning("a call waits for the creation of store %r: there is none yet%s", name, _list_near(near))

    def explain(self, error: TDServeError, timeout_s: float | None) -> TDServeError:
        """The error itself; one of a store that is missing with the names that are near, and the whole call's time."""
        if not isinstance(error, StoreNotCreatedError):
            return error
        near: list[str] | None = None
        with suppress(TDServeError):
            near = self.find_near(error.name)
        told = StoreNotCreatedError(what=error.what, timeout_s=timeout_s, name=error.name, near=_list_near(near or ()))
        told.__suppress_context__ = True
        return told

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Warns from a thread of its own, if the block lasts long."""
        timer = Timer(LOOK_AFTER_S, self.warn, (name,))
        timer.name, timer.daemon = f"tdserve-missing-{name}", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _may_warn(self, name: str) -> bool:
        now_s = time.monotonic()
        with self._lock:
            last_s = self._warned_s.pop(name, -WARN_AGAIN_S)
            if len(self._warned_s) >= MAX_WARNED:
                del self._warned_s[next(iter(self._warned_s))]
            is_due = now_s - last_s >= WARN_AGAIN_S
            self._warned_s[name] = now_s if is_due else last_s
        return is_due


def _list_near(names: Sequence[str]) -> str:
    return f", but {', '.join(map(repr, names))}" if names else ""
