"""A figure: what was measured, its floors, and the targets of the plan. Does no input or output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from tdserve.bench.measure import Round

Unit = Literal["us", "ms", "rows/s", "GB/s", "calls/s"]

PER_SECOND: dict[Unit, float] = {"us": 1e6, "ms": 1e3}
"""The units of time. The others are rates: more is better."""


@dataclass(frozen=True)
class Target:
    """A target of a figure.

    ``at least`` and ``below`` bound the figure in its own unit, or its detail with the name ``detail``. ``of floor`` is
    the least ratio to the floor with the name ``floor``, or to the first floor where that is empty. ``tail`` bounds the
    p99 of a figure of time: how many times the median of that floor it may take.
    """

    kind: Literal["at least", "below", "of floor", "tail"]
    bound: float
    floor: str = ""
    detail: str = ""


@dataclass(frozen=True)
class FloorFigure:
    """A floor beside a figure, in its unit. ``ratio`` is 1.0 when tdserve is as fast, 0.5 when it is half as fast."""

    name: str
    median: float
    ratio: float
    rounds: tuple[float, ...]

    def compute_ratios(self, figure: Figure) -> list[float]:
        """Returns the ratio of a figure to this floor in each pair of neighbouring rounds."""
        scale = Scale(figure.unit)
        pairs = zip(self.rounds, figure.rounds, strict=False)
        return [scale.compute_ratio([of_floor], [own]) for of_floor, own in pairs]


@dataclass(frozen=True)
class Figure:
    """A median with its tail and its floors.

    Attributes:
        workload: The workload that measured it.
        name: What was done.
        unit: The unit of ``median`` and ``rounds``.
        median: The median over the rounds.
        op_median_ms, op_p99_ms: Milliseconds of one operation. In a pipeline these are the gaps between completions.
        num_ops: The number of operations behind the p99.
        rounds: The value of each round, in order.
        floors: Gloo first, the fastest way of it before others: a target that names no floor means the first one.
        targets: Empty where the plan asks nothing.
        details: Further values by name, each the median over the rounds that have it.
    """

    workload: str
    name: str
    unit: Unit
    median: float
    op_median_ms: float
    op_p99_ms: float
    num_ops: int
    rounds: tuple[float, ...]
    floors: tuple[FloorFigure, ...]
    targets: tuple[Target, ...]
    details: Mapping[str, float]

    @property
    def is_met(self) -> bool | None:
        """Whether all targets are reached; ``None`` where there are none."""
        return all(self.meets(target) for target in self.targets) if self.targets else None

    def meets(self, target: Target) -> bool:
        """Returns whether one of the targets is reached."""
        floor = self.find_floor(target)
        if floor is not None and target.kind == "tail":
            return self.op_p99_ms * PER_SECOND[self.unit] / 1e3 <= target.bound * floor.median
        if floor is not None:
            return floor.ratio >= target.bound
        value = self.details[target.detail] if target.detail else self.median
        return value < target.bound if target.kind == "below" else value >= target.bound

    def find_floor(self, target: Target) -> FloorFigure | None:
        """Returns the floor that a target means; ``None`` for a target that bounds the figure itself."""
        if target.kind not in ("of floor", "tail"):
            return None
        return next(floor for floor in self.floors if target.floor in ("", floor.name))

    def to_json(self) -> dict[str, Any]:
        """Returns all fields and verdicts as plain values."""
        targets = [
            {**asdict(target), "floor": getattr(self.find_floor(target), "name", None), "met": self.meets(target)}
            for target in self.targets
        ]
        return {**asdict(self), "targets": targets, "met": self.is_met}


@dataclass(frozen=True)
class Scale:
    """How rounds become a figure: a time in ``us`` or ``ms``, or a rate, of ``amount`` for each operation."""

    unit: Unit
    amount: float = 1.0

    def convert(self, rounds: Sequence[Round]) -> tuple[float, ...]:
        """Returns the value of each round, in the unit."""
        if self.unit in PER_SECOND:
            return tuple(each.median_s * PER_SECOND[self.unit] for each in rounds)
        return tuple(each.ops_per_s * self.amount for each in rounds)

    def compute_ratio(self, floor: Sequence[float], subject: Sequence[float]) -> float:
        """Returns how near the subject comes to the floor: the median over pairs of neighbouring rounds."""
        quotients = np.divide(floor, subject) if self.unit in PER_SECOND else np.divide(subject, floor)
        return float(np.median(quotients))


def to_gigabytes(nbytes: int) -> float:
    """Returns decimal gigabytes, the unit in which networks are sold."""
    return nbytes / 1e9


def make_figure(
    workload: str,
    name: str,
    scale: Scale,
    *,
    subject: Sequence[Round],
    floors: Mapping[str, Sequence[Round]],
    targets: Sequence[Target] = (),
) -> Figure:
    """Joins the rounds of a subject with those of its floors.

    Args:
        workload: The workload that measured them.
        name: What was done.
        scale: The unit of the figure.
        subject: What tdserve did.
        floors: The floors by name.
        targets: The targets of the figure. Those that mean a floor that was not measured are left out.
    """
    rounds = scale.convert(subject)
    found = []
    for key, series in floors.items():
        values = scale.convert(series)
        found.append(FloorFigure(key, median(values), scale.compute_ratio(values, rounds), values))
    op_s = [seconds for each in subject for seconds in each.op_s]
    return Figure(
        workload=workload,
        name=name,
        unit=scale.unit,
        median=median(rounds),
        op_median_ms=median(each.median_s for each in subject) * 1e3,
        op_p99_ms=float(np.percentile(op_s, 99, method="inverted_cdf")) * 1e3,
        num_ops=len(op_s),
        rounds=rounds,
        floors=tuple(sorted(found, key=lambda floor: -floor.median if floor.name.startswith("gloo") else 0.0)),
        targets=tuple(target for target in targets if target.floor in ("", *floors)),
        details=_take_medians([each.details for each in subject]),
    )


def _take_medians(series: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in series for name in values)
    return {name: median(values[name] for values in series if name in values) for name in names}
