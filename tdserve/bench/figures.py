"""One figure: what was measured, its floors, and the target of the plan beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tdserve.bench.measure import Series, latency_ratio, rate_ratio

Unit = Literal["us", "ms", "rows/s", "GB/s"]

PER_SECOND: dict[Unit, float] = {"us": 1e6, "ms": 1e3}
"""Units of time; the others are rates, of which more is better."""


@dataclass(frozen=True)
class Target:
    """What the plan asks of a figure.

    ``at least`` and ``below`` bound the figure in its own unit, ``of floor`` the ratio to its first
    floor, from below.
    """

    kind: Literal["at least", "below", "of floor"]
    bound: float

    def is_met(self, value: float, ratio: float) -> bool:
        """Whether a figure with this value and ratio reaches the target."""
        if self.kind == "at least":
            return value >= self.bound
        return value < self.bound if self.kind == "below" else ratio >= self.bound


@dataclass(frozen=True)
class FloorFigure:
    """A floor beside a figure, in its unit. ``ratio``: 1.0 when tdserve is as fast, 0.5 when it is half as fast."""

    name: str
    value: float
    ratio: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """A median with its tail and its floors.

    Attributes:
        workload: Which workload.
        name: What was done.
        unit: Of ``value``.
        value: Median over the rounds.
        op_median_ms, op_p99_ms: Milliseconds of one operation. In a pipeline these are the gaps between completions.
        floors: The first is the one that the target means.
        target: ``None`` where the plan asks nothing.
        num_ops: Operations behind the p99.
        rounds: The value of each round, in order.
    """

    workload: str
    name: str
    unit: Unit
    value: float
    op_median_ms: float
    op_p99_ms: float
    floors: tuple[FloorFigure, ...]
    target: Target | None
    num_ops: int
    rounds: tuple[float, ...]

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; ``None`` without a target."""
        if self.target is None:
            return None
        return self.target.is_met(self.value, self.floors[0].ratio if self.floors else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "workload": self.workload,
            "name": self.name,
            "unit": self.unit,
            "median": self.value,
            "op_median_ms": self.op_median_ms,
            "op_p99_ms": self.op_p99_ms,
            "num_ops": self.num_ops,
            "rounds": list(self.rounds),
            "floors": [
                {"name": floor.name, "median": floor.value, "ratio": floor.ratio, "rounds": list(floor.rounds)}
                for floor in self.floors
            ],
            "target": None if self.target is None else {"kind": self.target.kind, "bound": self.target.bound},
            "met": self.is_met,
        }


@dataclass(frozen=True)
class Scale:
    """How a series becomes a figure: a time in ``us`` or ``ms``, or a rate of ``amount`` rows or GB per operation."""

    unit: Unit
    amount: float = 1.0

    def value(self, series: Series) -> float:
        """Median in the unit."""
        if self.unit in PER_SECOND:
            return series.median_s * PER_SECOND[self.unit]
        return series.ops_per_s * self.amount

    def rounds(self, series: Series) -> tuple[float, ...]:
        """The value of each round."""
        if self.unit in PER_SECOND:
            return tuple(each.median_s * PER_SECOND[self.unit] for each in series.rounds)
        return tuple(each.ops_per_s * self.amount for each in series.rounds)

    def ratio(self, floor: Series, subject: Series) -> float:
        """How near the subject comes to the floor."""
        return latency_ratio(floor, subject) if self.unit in PER_SECOND else rate_ratio(floor, subject)


def gigabytes(nbytes: int) -> float:
    """Decimal gigabytes, as the wire is sold."""
    return nbytes / 1e9


def make_figure(
    workload: str,
    name: str,
    scale: Scale,
    *,
    subject: Series,
    floors: Mapping[str, Series],
    target: Target | None = None,
) -> Figure:
    """Joins a subject's series with those of its floors.

    Args:
        workload: Which workload.
        name: What was done.
        scale: Into which unit.
        subject: What tdserve did.
        floors: By name; a target of the kind ``of floor`` means the first.
        target: What the plan asks.
    """
    found = [
        FloorFigure(key, scale.value(series), scale.ratio(series, subject), scale.rounds(series))
        for key, series in floors.items()
    ]
    return Figure(
        workload=workload,
        name=name,
        unit=scale.unit,
        value=scale.value(subject),
        op_median_ms=subject.median_s * 1e3,
        op_p99_ms=subject.p99_s * 1e3,
        floors=tuple(found),
        target=target,
        num_ops=sum(len(each.op_s) for each in subject.rounds),
        rounds=scale.rounds(subject),
    )
