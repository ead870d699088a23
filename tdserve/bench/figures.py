"""One figure: what was measured, its floors, and the target of the plan beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.measure import Series

Unit = Literal["us", "ms", "rows/s", "GB/s"]

PER_SECOND: dict[Unit, float] = {"us": 1e6, "ms": 1e3}
"""Units of time; the others are rates, of which more is better."""


@dataclass(frozen=True)
class Target:
    """What the plan asks of a figure.

    ``at least`` and ``below`` bound the figure in its own unit, ``of floor`` from below the ratio to the floor named
    ``floor``, or to the first where that is empty.
    """

    kind: Literal["at least", "below", "of floor"]
    bound: float
    floor: str = ""

    def is_met(self, value: float, ratio: float) -> bool:
        """Whether a figure with this value, and this ratio to the floor that is meant, reaches the target."""
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
        floors: The first is the one that a target means which names none.
        targets: Empty where the plan asks nothing.
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
    targets: tuple[Target, ...]
    num_ops: int
    rounds: tuple[float, ...]

    @property
    def is_met(self) -> bool | None:
        """Whether all targets are reached; ``None`` without any."""
        return all(self.meets(target) for target in self.targets) if self.targets else None

    def meets(self, target: Target) -> bool:
        """Whether one of the targets is reached."""
        floor = self.floor_of(target)
        return target.is_met(self.value, 0.0 if floor is None else floor.ratio)

    def floor_of(self, target: Target) -> FloorFigure | None:
        """The floor that a target means; ``None`` for one that bounds the figure itself."""
        if target.kind != "of floor":
            return None
        return next(floor for floor in self.floors if target.floor in ("", floor.name))

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
            "targets": [
                {
                    "kind": target.kind,
                    "bound": target.bound,
                    "floor": None if (floor := self.floor_of(target)) is None else floor.name,
                    "met": self.meets(target),
                }
                for target in self.targets
            ],
            "met": self.is_met,
        }


@dataclass(frozen=True)
class Scale:
    """How a series becomes a figure: a time in ``us`` or ``ms``, or a rate of ``amount`` rows or GB per operation."""

    unit: Unit
    amount: float = 1.0

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.unit in PER_SECOND

    def rounds(self, series: Series) -> tuple[float, ...]:
        """The value of each round, in the unit."""
        if self.is_time:
            return tuple(each.median_s * PER_SECOND[self.unit] for each in series.rounds)
        return tuple(each.ops_per_s * self.amount for each in series.rounds)

    def ratio(self, floor: Series, subject: Series) -> float:
        """How near the subject comes to the floor: the median over pairs of neighbouring rounds."""
        pairs = zip(self.rounds(floor), self.rounds(subject), strict=True)
        return median(low / own if self.is_time else own / low for low, own in pairs)


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
    targets: Sequence[Target] = (),
) -> Figure:
    """Joins a subject's series with those of its floors.

    Args:
        workload: Which workload.
        name: What was done.
        scale: Into which unit.
        subject: What tdserve did.
        floors: By name; a target of the kind ``of floor`` that names none means the first.
        targets: What the plan asks.

    Raises:
        InvalidRequestError: A target means a floor that was not measured.
    """
    for target in targets:
        if target.kind == "of floor" and not (target.floor in floors if target.floor else floors):
            raise InvalidRequestError(argument="targets", reason=f"{name!r} has no floor {target.floor!r}")
    found = [
        FloorFigure(key, median(scale.rounds(series)), scale.ratio(series, subject), scale.rounds(series))
        for key, series in floors.items()
    ]
    return Figure(
        workload=workload,
        name=name,
        unit=scale.unit,
        value=median(scale.rounds(subject)),
        op_median_ms=subject.median_s * 1e3,
        op_p99_ms=subject.p99_s * 1e3,
        floors=tuple(found),
        targets=tuple(targets),
        num_ops=sum(len(each.op_s) for each in subject.rounds),
        rounds=scale.rounds(subject),
    )
