"""When a run ends by itself, and what its end is called."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium

from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.watch import Snapshot


class Ending(NamedTuple):
    """Why a run ended."""

    reason: str
    exit_code: int
    details: str = ""  # last lines of a process that died


SOLVED = Ending("solved", 0)
TIME_IS_UP = Ending("time is up", 0)


class Goal(NamedTuple):
    """When a run ends by itself."""

    target: float | None  # mean return; None where the environment names none
    max_seconds: float

    def ending(self, seen: Snapshot) -> Ending | None:
        """The ending that has been reached, if any."""
        if self.target is not None and seen.mean_return is not None and seen.mean_return >= self.target:
            return SOLVED
        return TIME_IS_UP if seen.seconds >= self.max_seconds else None


def target_of(options: DemoOptions) -> float | None:
    """The mean return that counts as solved; None where nobody names one."""
    if options.target is not None:
        return options.target
    found: float | None = gymnasium.spec(options.env).reward_threshold
    return found
