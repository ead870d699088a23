"""Timing: rounds of operations, floors and subjects in turn, medians and tails. Knows nothing of what it times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tdserve.base.errors import InvalidRequestError

SUBJECT = "tdserve"
"""The name of what is measured against the floors, among the tasks that take turns."""


@dataclass(frozen=True)
class Pacing:
    """How long one round lasts: until ``round_s`` seconds were spent in operations, within bounds on their number."""

    round_s: float
    min_ops: int = 2
    max_ops: int = 100_000


@dataclass(frozen=True)
class Round:
    """One round: the seconds of every operation, and of all of them with what had to be waited for at the end.

    Attributes:
        last: What the last operation returned, for the check; dropped after it.
    """

    op_s: tuple[float, ...]
    elapsed_s: float
    last: Any = None

    @property
    def median_s(self) -> float:
        """Median seconds of one operation."""
        return median(self.op_s)

    @property
    def ops_per_s(self) -> float:
        """Operations per second over the whole round."""
        return len(self.op_s) / self.elapsed_s


@dataclass(frozen=True)
class Task:
    """One thing to measure: a floor or a subject.

    Attributes:
        run_round: Does one round.
        check: Verifies what the last operation of a round has returned; not timed.
    """

    run_round: Callable[[], Round]
    check: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Series:
    """The rounds of one task, in the order of time."""

    rounds: tuple[Round, ...]

    @property
    def median_s(self) -> float:
        """Median seconds of an operation: the median of the rounds' medians, so that one bad round does not count."""
        return median(each.median_s for each in self.rounds)

    @property
    def p99_s(self) -> float:
        """99th percentile over the operations of all rounds."""
        return percentile([seconds for each in self.rounds for seconds in each.op_s], 99)

    @property
    def ops_per_s(self) -> float:
        """Median of the rounds' rates."""
        return median(each.ops_per_s for each in self.rounds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: one of the values, and the largest where they are too few."""
    if not values:
        raise InvalidRequestError(argument="values", reason="a percentile of nothing")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(max(int(rank), 1), len(ordered)) - 1]


def timed_round(
    operation: Callable[[], object],
    pacing: Pacing,
    *,
    before: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> Round:
    """Repeats an operation.

    Args:
        operation: What is timed, one by one.
        pacing: When to stop.
        before: Done before every operation, not timed.
        finish: Done once at the end and counted in ``elapsed_s``: waits for what is still under way, so that a
            pipeline's last operations are not given away.
    """
    op_s: list[float] = []
    elapsed_s = 0.0
    last = None
    while len(op_s) < pacing.min_ops or (elapsed_s < pacing.round_s and len(op_s) < pacing.max_ops):
        if before is not None:
            before()
        started = time.perf_counter()
        last = operation()
        op_s.append(time.perf_counter() - started)
        elapsed_s += op_s[-1]
    if finish is not None:
        started = time.perf_counter()
        finish()
        elapsed_s += time.perf_counter() - started
    return Round(tuple(op_s), elapsed_s, last)


def alternate(tasks: Mapping[str, Task], num_rounds: int) -> dict[str, Series]:
    """Runs every task in turn, ``num_rounds`` times, after one warm-up turn that is thrown away.

    Whatever else the machine does then slows floors and subjects alike, and the ratio of a round's neighbours stays.
    """
    rounds: dict[str, list[Round]] = {name: [] for name in tasks}
    for turn in range(num_rounds + 1):
        for name, task in tasks.items():
            done = task.run_round()
            if task.check is not None:
                task.check(done.last)
            if turn > 0:
                rounds[name].append(Round(done.op_s, done.elapsed_s))
    return {name: Series(tuple(each)) for name, each in rounds.items()}
