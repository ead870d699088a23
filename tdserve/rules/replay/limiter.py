"""Limiters: which calls must wait. A limiter is a setting and decides from counts alone, so it can be asked after every
change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from tdserve.base.arguments import to_finite_number
from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer


@dataclass(frozen=True)
class LimiterCounts:
    """The counts that a limiter decides from.

    Attributes:
        num_rows: Live rows.
        inserts: Rows ever committed.
        samples: Rows ever sampled.
        capacity: Most rows.
        reserved: Rows that writers hold now and have not committed. A limiter counts them as inserted when it decides
            on an insert, so that concurrent writers stay within the bounds together.
        num_spent: Rows that were sampled for the last time, or had by all consumers, and are kept for the ranks of a
            step.
    """

    num_rows: int
    inserts: int
    samples: int
    capacity: int
    reserved: int = 0
    num_spent: int = 0


class Limiter(ABC):
    """Base of all limiters: a frozen dataclass whose fields go into JSON.

    Attributes:
        kind: Its name in JSON.
        blocks_writers: Whether a writer may have to wait for it. If not, extends may be stored together.
        keeps_rows: Whether writers wait before a row is overwritten.
    """

    kind: ClassVar[str]
    blocks_writers: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = False

    @property
    def min_drawable(self) -> int:
        """Live rows from which on no draw has to wait, however many were drawn; 0: the limiter counts
        them."""
        return 0

    def check(self, capacity: int) -> None:  # noqa: B027 (some refuse nothing)
        """Refuses a setting under which no sample could ever be drawn, or rows would be lost.

        Raises:
            InvalidRequestError: The setting is refused, with the reason.
        """

    def check_times_sampled(self, max_times_sampled: int) -> None:  # noqa: B027 (some refuse nothing)
        """Refuses a table whose rows leave it too early for this setting.

        Args:
            max_times_sampled: Number of samples after which a row leaves; 0: never.

        Raises:
            InvalidRequestError: The setting is refused, with the reason.
        """

    def check_sample(self, capacity: int, num_rows: int) -> None:  # noqa: B027 (some refuse nothing)
        """Refuses a sample of more rows than may ever be drawn at once.

        Raises:
            InvalidRequestError: There are too many. Nothing was changed.
        """

    def check_insert(self, capacity: int, num_rows: int) -> None:  # noqa: B027 (some refuse nothing)
        """Refuses a write of more rows than may ever be inserted at once.

        Raises:
            InvalidRequestError: There are too many. Nothing was changed.
        """

    @abstractmethod
    def can_sample(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be drawn now."""

    @abstractmethod
    def can_insert(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be reserved now."""

    @abstractmethod
    def explain_sample(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a sample waits for, for the error when it has waited too long."""

    @abstractmethod
    def explain_insert(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a write waits for, for the error when it has waited too long."""

    @abstractmethod
    def make_part(self, num_shards: int) -> Limiter:
        """Returns the limiter of each shard of a table of several servers, so that all do what this one of the whole
        table would. Readers count what a sample of the whole table needs."""

    def compute_max_batch_rows(self, capacity: int) -> int:
        """Returns how many rows a writer may send together, so that it and samples do not wait for each other."""
        return capacity


@dataclass(frozen=True)
class MinSize(Limiter):
    """Samples wait until the table has enough rows; writers never wait.

    Attributes:
        min_size: Live rows, at least 1, since nothing can be drawn from an empty table.
    """

    min_size: int = 1

    kind: ClassVar[str] = "min_size"
    blocks_writers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", check_integer("min_size", self.min_size, 1))

    @property
    def min_drawable(self) -> int:
        """See :class:`Limiter`."""
        return self.min_size

    def check(self, capacity: int) -> None:
        """Refuses a setting under which no sample could ever be drawn.

        Raises:
            InvalidRequestError: ``min_size`` is above the capacity.
        """
        _check_min_size(self.min_size, capacity)

    def can_sample(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be drawn now."""
        return counts.num_rows >= self.min_size

    def can_insert(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be reserved now."""
        return True

    def explain_sample(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a sample waits for, for the error when it has waited too long."""
        need = "" if self.can_sample(counts, num_rows) else f"needs a size of {self.min_size}"
        return _describe_wait("sample", counts, table, num_rows, self, need)

    def explain_insert(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a write waits for, for the error when it has waited too long."""
        return _describe_wait("insert", counts, table, num_rows, self, "")

    def make_part(self, num_shards: int) -> MinSize:
        """Returns one that lets samples through as soon as there is a row: a sample needs ``min_size`` rows of all
        shards together, of which one may have few."""
        return MinSize(1)


def choose_limiter(limiter: Limiter | None, min_size: Any) -> Limiter:
    """Returns the limiter of a new table: the one that was given, or ``MinSize(min_size)``.

    Raises:
        InvalidRequestError: ``min_size`` is no integer of at least 1, or a limiter is given that does not have it.
    """
    min_size = check_integer("min_size", min_size, 1)
    if limiter is None:
        return MinSize(min_size)
    if min_size not in (1, getattr(limiter, "min_size", 1)):
        reason = f"{min_size}, while {limiter} decides when samples wait: give min_size to a limiter that has one"
        raise InvalidRequestError(argument="min_size", reason=reason)
    return limiter


@dataclass(frozen=True)
class SampleToInsertRatio(Limiter):
    """Keeps ``samples / inserts`` near a ratio: the side that is ahead waits for the other.

    Let ``diff = inserts * ratio - samples``; it is ``min_size * ratio`` when the table has just been filled far enough.
    An insert passes if diff is afterwards at most ``min_size * ratio + error_buffer``. A sample passes if diff is
    afterwards at least ``min_size * ratio - error_buffer`` and the table has ``min_size`` live rows. Inserts into a
    table of fewer than ``min_size`` rows always pass. Rows that were overwritten still count as inserted. The counts
    are whole numbers and the ratio counts as it is written (0.1 is a tenth), so nothing drifts.

    Both counts are exact, over restarts and ``kill -9`` of the server too, except for a sample that was under way when
    its client, its data worker or the server was killed: it counts or not. Batches that ``batches(prefetch=)`` has
    drawn and not returned count as sampled.

    Attributes:
        ratio: Rows sampled per row inserted, above 0.
        min_size: Live rows that a sample needs, at least 1.
        error_buffer: Sampled rows by which diff may deviate in either direction; required. It is at least half of the
            change of diff by the largest sample and the largest write, ``(num_rows + ratio * num_written) / 2``;
            otherwise those two may wait for each other.
    """

    ratio: float
    min_size: int = 1
    error_buffer: float = math.nan

    kind: ClassVar[str] = "sample_to_insert_ratio"

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", check_integer("min_size", self.min_size, 1))
        if self.error_buffer != self.error_buffer:
            raise InvalidRequestError(argument="error_buffer", reason="it must be given, a finite number above 0")
        for argument in ("ratio", "error_buffer"):
            number = to_finite_number(argument, getattr(self, argument))
            if not number:
                raise InvalidRequestError(argument=argument, reason="0 is not above 0")
            object.__setattr__(self, argument, number)

    @cached_property
    def _steps(self) -> tuple[int, int, int]:
        """The change of diff by one insert and by one sample, and the error buffer, in the ratio's smallest unit."""
        ratio = Fraction(repr(self.ratio))
        return ratio.numerator, ratio.denominator, int(Fraction(repr(self.error_buffer)) * ratio.denominator)

    def check(self, capacity: int) -> None:
        """Refuses a setting under which all calls would soon wait for ever, even with single rows.

        Raises:
            InvalidRequestError: ``min_size`` is above the capacity, or ``error_buffer`` too small.
        """
        _check_min_size(self.min_size, capacity)
        insert, sample, buffer = self._steps
        # diff is a whole number that changes by +insert and -sample, which have no common divisor. A cycle takes insert
        # + sample different values; with fewer, diff gets stuck where neither step is allowed.
        if 2 * buffer + 1 < insert + sample:
            enough = max(1.0, self.ratio)
            reason = (
                f"{self.error_buffer:g} is too small: with a ratio of {self.ratio:g} inserts and samples of single "
                f"rows would wait for each other for ever; {enough:g} is enough for these"
            )
            raise InvalidRequestError(argument="error_buffer", reason=reason)

    def check_times_sampled(self, max_times_sampled: int) -> None:
        """Refuses rows that leave before the ratio is reached.

        Raises:
            InvalidRequestError: They do.
        """
        if 0 < max_times_sampled < self.ratio:
            reason = (
                f"a ratio of {self.ratio:g} samples per insert is never reached with max_times_sampled "
                f"{max_times_sampled}, and writers would wait for ever"
            )
            raise InvalidRequestError(argument="limiter", reason=reason)

    def check_sample(self, capacity: int, num_rows: int) -> None:
        """Refuses a sample that is wider than the window.

        Raises:
            InvalidRequestError: There are too many. Nothing was changed.
        """
        _, sample, buffer = self._steps
        if num_rows * sample > 2 * buffer:
            reason = (
                f"a sample of {num_rows} rows never gets through an error_buffer of {self.error_buffer:g}; sample at "
                f"most {2 * buffer // sample} rows at once, or make it at least {num_rows / 2:g}"
            )
            raise InvalidRequestError(argument="num_rows", reason=reason)

    def check_insert(self, capacity: int, num_rows: int) -> None:
        """Refuses a write that could not even be the first one.

        Raises:
            InvalidRequestError: It is larger than ``min_size`` and wider than the window. Nothing was changed.
        """
        insert, _, buffer = self._steps
        if num_rows * insert > max(2 * buffer, self.min_size * insert + buffer):
            reason = f"an insert of {num_rows} rows never gets through: {self._make_insert_hint(num_rows)}"
            raise InvalidRequestError(argument="num_rows", reason=reason)

    def can_sample(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be drawn now."""
        insert, sample, buffer = self._steps
        after = counts.inserts * insert - (counts.samples + num_rows) * sample
        return counts.num_rows >= self.min_size and after >= self.min_size * insert - buffer

    def can_insert(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be reserved now."""
        # Below min_size there are no samples, and only inserts help, even one that goes beyond it.
        if counts.num_rows + counts.reserved < self.min_size:
            return True
        insert, sample, buffer = self._steps
        after = (counts.inserts + counts.reserved + num_rows) * insert - counts.samples * sample
        return after <= self.min_size * insert + buffer

    def explain_sample(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a sample waits for, for the error when it has waited too long."""
        need = ""
        if not self.can_sample(counts, num_rows):
            low = self.min_size * self.ratio - self.error_buffer
            need = (
                f"needs a size of {self.min_size} and inserts * ratio - samples, now "
                f"{self._diff(counts.inserts, counts.samples)}, to be at least {low:.12g} afterwards"
            )
        return _describe_wait("sample", counts, table, num_rows, self, need)

    def explain_insert(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a write waits for, for the error when it has waited too long."""
        need = ""
        if not self.can_insert(counts, num_rows):
            high = self.min_size * self.ratio + self.error_buffer
            need = (
                f"needs inserts * ratio - samples, now {self._diff(counts.inserts + counts.reserved, counts.samples)} "
                f"with what others write, to be at most {high:.12g} afterwards"
            )
            insert, _, buffer = self._steps
            if num_rows * insert > 2 * buffer:
                need += f", where {self._make_insert_hint(num_rows)}"
        return _describe_wait("insert", counts, table, num_rows, self, need)

    def make_part(self, num_shards: int) -> SampleToInsertRatio:
        """Returns the same ratio, which each shard keeps by itself, with the error buffer of the whole: a sample may
        take most of its rows from one."""
        return replace(self, min_size=-(-self.min_size // num_shards))

    def _diff(self, inserts: int, samples: int) -> str:
        return f"{inserts * self.ratio - samples:.12g}"

    def _make_insert_hint(self, num_rows: int) -> str:
        insert, _, buffer = self._steps
        return (
            f"an error_buffer of {self.error_buffer:g} with a ratio of {self.ratio:g} lets at most "
            f"{2 * buffer // insert} rows through at once after the first {self.min_size}; write fewer, or make it at "
            f"least {num_rows * self.ratio / 2:g}"
        )


@dataclass(frozen=True)
class Queue(Limiter):
    """Writers wait while the table is full, samples while it has fewer rows than they ask for.

    Attributes:
        max_size: Most rows, including those that writers hold, and those that are used up and kept for the ranks of a
            step; at least 1.
    """

    max_size: int

    kind: ClassVar[str] = "queue"
    keeps_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_size", check_integer("max_size", self.max_size, 1))

    def check(self, capacity: int) -> None:
        """Refuses a queue that is longer than its table: rows would be overwritten before they are taken.

        Raises:
            InvalidRequestError: ``max_size`` is above the capacity.
        """
        if self.max_size > capacity:
            reason = f"{self.max_size} rows do not fit into a capacity of {capacity}"
            raise InvalidRequestError(argument="max_size", reason=reason)

    def check_sample(self, capacity: int, num_rows: int) -> None:
        """Refuses a sample of more rows than there may ever be.

        Raises:
            InvalidRequestError: ``num_rows`` is above ``max_size``. Nothing was changed.
        """
        self._check_rows("sample", num_rows)

    def check_insert(self, capacity: int, num_rows: int) -> None:
        """Refuses a write of more rows than there may ever be.

        Raises:
            InvalidRequestError: ``num_rows`` is above ``max_size``. Nothing was changed.
        """
        self._check_rows("insert", num_rows)

    def can_sample(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be drawn now."""
        return counts.num_rows >= num_rows

    def can_insert(self, counts: LimiterCounts, num_rows: int) -> bool:
        """Returns whether ``num_rows`` may be reserved now."""
        return counts.num_rows + counts.num_spent + counts.reserved + num_rows <= self.max_size

    def explain_sample(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a sample waits for, for the error when it has waited too long."""
        need = "" if self.can_sample(counts, num_rows) else f"needs a size of {num_rows}"
        return _describe_wait("sample", counts, table, num_rows, self, need)

    def explain_insert(self, counts: LimiterCounts, table: str, num_rows: int) -> str:
        """Returns what a write waits for, for the error when it has waited too long."""
        room = self.max_size - num_rows
        need = (
            ""
            if self.can_insert(counts, num_rows)
            else f"needs a size, reserved and kept rows included, of at most {room}"
        )
        return _describe_wait("insert", counts, table, num_rows, self, need)

    def make_part(self, num_shards: int) -> Queue:
        """Returns a queue of an equal part of the rows, rounded up."""
        return Queue(-(-self.max_size // num_shards))

    def compute_max_batch_rows(self, capacity: int) -> int:
        """Returns half of the queue, so that a batch finds room while takers wait for another half."""
        return max(1, self.max_size // 2)

    def _check_rows(self, event: str, num_rows: int) -> None:
        if num_rows > self.max_size:
            reason = f"{event} of {num_rows} rows never fits a queue of max_size {self.max_size}; ask for fewer at once"
            raise InvalidRequestError(argument="num_rows", reason=reason)


def _check_min_size(min_size: int, capacity: int) -> None:
    if min_size > capacity:
        reason = f"{min_size} rows never fit into a capacity of {capacity}, so no sample could be drawn"
        raise InvalidRequestError(argument="min_size", reason=reason)


def _describe_wait(event: str, counts: LimiterCounts, table: str, num_rows: int, limiter: Limiter, need: str) -> str:
    if not need:
        cause = "the sampler has too few rows to draw from" if event == "sample" else "others hold too many rows"
        need = f"lets it through while {cause}"
    article = "an" if event == "insert" else "a"
    kept = f", kept for the ranks of a step {counts.num_spent}" if counts.num_spent else ""
    return (
        f"{article} {event} of {num_rows} rows, table {table!r} (size {counts.num_rows} of {counts.capacity}, reserved "
        f"{counts.reserved}{kept}, inserts {counts.inserts}, samples {counts.samples}), where {limiter!r} {need},"
    )
