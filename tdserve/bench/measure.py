"""Timing: rounds of operations, floors and subjects in turn, medians and tails. It does not depend on what is timed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

SUBJECT = "tdserve"
"""Among the tasks that take turns, the name of the one that is measured against the floors."""


@dataclass(frozen=True)
class Pacing:
    """The length of a round: ``round_s`` seconds spent in operations, within bounds on their number."""

    round_s: float
    min_ops: int = 2
    max_ops: int = 100_000


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        op_s: Seconds of each operation.
        elapsed_s: Seconds of all operations together, with the wait at the end.
        last: What the last operation returned. It is dropped after the check.
        details: Further values by name.
    """

    op_s: tuple[float, ...]
    elapsed_s: float
    last: Any = None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """The median seconds of one operation."""
        return median(self.op_s)

    @property
    def ops_per_s(self) -> float:
        """The operations per second over the whole round."""
        return len(self.op_s) / self.elapsed_s


@dataclass(frozen=True)
class Task:
    """One thing to measure: a floor or a subject.

    Attributes:
        run_round: Does one round of the given length.
        check: Verifies what the last operation of a round returned. It is not timed.
    """

    run_round: Callable[[Pacing], Round]
    check: Callable[[Any], None] | None = None


def time_round(
    operation: Callable[[], object],
    pacing: Pacing,
    *,
    before: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> Round:
    """Repeats an operation and times each call.

    Args:
        operation: The operation.
        pacing: When to stop.
        before: Called before every operation and not timed.
        finish: Called once at the end and counted in ``elapsed_s``. It waits for what is still under way, so that the
            last operations of a pipeline do not come for free.
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


def make_task(
    operation: Callable[[], object],
    check: Callable[[Any], None] | None = None,
    *,
    before: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> Task:
    """Returns the task whose rounds are ``time_round`` of the same arguments."""
    return Task(lambda pacing: time_round(operation, pacing, before=before, finish=finish), check)


def add_tasks(first: Task, second: Task) -> Task:
    """Returns a task each of whose operations takes as long as one of either task together."""

    def run_round(pacing: Pacing) -> Round:
        both = first.run_round(pacing), second.run_round(pacing)
        op_s = tuple(map(sum, zip(*(each.op_s for each in both), strict=False)))
        return Round(op_s, sum(op_s))

    return Task(run_round)


def make_pipeline(start: Callable[[], Future[Any]], window: int, check: Callable[[Any], None] | None = None) -> Task:
    """Returns the task of operations of which ``window`` are under way. A round ends when all are done.

    Args:
        start: Starts an operation.
        window: The number under way.
        check: Verifies the result of the last operation of a round.
    """
    under_way: deque[Future[Any]] = deque()

    def operate() -> Future[Any]:
        if len(under_way) == window:
            under_way.popleft().result()
        under_way.append(start())
        return under_way[-1]

    def drain() -> None:
        while under_way:
            under_way.popleft().result()

    return make_task(operate, None if check is None else lambda last: check(last.result()), finish=drain)


def alternate(tasks: Mapping[str, Task], num_rounds: int, pacing: Pacing) -> dict[str, list[Round]]:
    """Runs the tasks in turn, ``num_rounds`` times, after one warm-up turn that is thrown away.

    What else the machine does slows floors and subjects alike, so the ratio of two neighbouring rounds stays the same.
    """
    rounds: dict[str, list[Round]] = {name: [] for name in tasks}
    for turn in range(num_rounds + 1):
        for name, task in tasks.items():
            done = task.run_round(pacing)
            if task.check is not None:
                task.check(done.last)
            if turn > 0:
                rounds[name].append(replace(done, last=None))
    return rounds
