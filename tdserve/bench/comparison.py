"""Compares the figures of two runs: how much faster, by itself and beside the floor, and beyond the spread or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.bench.figures import PER_SECOND, Figure, FloorFigure, Unit

MIN_ROUNDS = 3
"""Of fewer rounds the spread means nothing: two of each run lie apart by luck once in three times."""

PASSING_FACTS = ("load_average_1_min", "root")
"""Facts of a machine that differ from run to run."""


@dataclass(frozen=True)
class SavedRun:
    """A run that ``tdserve bench --json`` wrote.

    Attributes:
        path: The file.
        machine: Facts of its machine, by name.
        is_quick: Whether its sizes were small.
        figures: Its figures, without targets.
    """

    path: Path
    machine: Mapping[str, Any]
    is_quick: bool
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Change:
    """How much faster something has become.

    Attributes:
        ratio: 2.0 where it takes half the time, or does twice as much in the same.
        is_beyond: Whether the change is beyond the spread of both runs: every round of one was faster than every round
            of the other. None where either has fewer than ``MIN_ROUNDS``.
    """

    ratio: float
    is_beyond: bool | None


@dataclass(frozen=True)
class Comparison:
    """A figure that both runs have.

    Attributes:
        before: The figure of the saved run.
        now: The figure of this one.
        change: Change of the figure itself, which moves with the machine.
        floor: The name of the first floor that both have; None where there is none.
        beside_floor: Change of the ratio to that floor, which each run measured in turn with the figure.
    """

    before: Figure
    now: Figure
    change: Change
    floor: str | None
    beside_floor: Change | None


def read_run(path: Path) -> SavedRun:
    """Reads a saved run.

    Raises:
        InvalidRequestError: The file cannot be read, or ``tdserve bench --json`` did not write it.
    """
    try:
        content = json.loads(path.read_bytes())
        figures = tuple(map(_parse_figure, content["figures"]))
        return SavedRun(path, dict(content["machine"]), bool(content["options"]["quick"]), figures)
    except OSError as fault:
        raise InvalidRequestError(argument="--compare", reason=f"{path}: {fault.strerror}") from fault
    except (ValueError, LookupError, TypeError, AttributeError) as fault:
        reason = f"{path} is not a file that `tdserve bench --json` wrote ({type(fault).__name__}: {fault})"
        raise InvalidRequestError(argument="--compare", reason=reason) from fault


def compare_figures(before: Iterable[Figure], now: Iterable[Figure]) -> list[Comparison]:
    """Compares the figures that both runs have, in the order of the second."""
    known = {(figure.workload, figure.name, figure.unit): figure for figure in before}
    found = []
    for figure in now:
        earlier = known.get((figure.workload, figure.name, figure.unit))
        if earlier is not None and earlier.rounds and min(*earlier.rounds, *figure.rounds, earlier.median) > 0:
            found.append(_compare(earlier, figure))
    return found


def list_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of the facts in which two machines differ."""
    names = {**before, **now}
    return [name for name in names if name not in PASSING_FACTS and before.get(name) != now.get(name)]


def _parse_figure(content: Mapping[str, Any]) -> Figure:
    floors = tuple(FloorFigure(**{**floor, "rounds": tuple(floor["rounds"])}) for floor in content["floors"])
    unit: Unit = content["unit"]
    return Figure(
        workload=content["workload"],
        name=content["name"],
        unit=unit,
        median=float(content["median"]),
        op_median_ms=float(content["op_median_ms"]),
        op_p99_ms=float(content["op_p99_ms"]),
        num_ops=int(content["num_ops"]),
        rounds=tuple(map(float, content["rounds"])),
        floors=floors,
        targets=(),
        details=dict(content["details"]),
    )


def _compare(before: Figure, now: Figure) -> Comparison:
    is_time = now.unit in PER_SECOND
    change = _find_change(before.median, now.median, before.rounds, now.rounds, is_less_faster=is_time)
    earlier = {floor.name: floor for floor in before.floors if floor.ratio > 0}
    for floor in now.floors:
        if floor.name not in earlier:
            continue
        old = earlier[floor.name]
        quotients = old.compute_ratios(before), floor.compute_ratios(now)
        beside = _find_change(old.ratio, floor.ratio, *quotients, is_less_faster=False)
        return Comparison(before, now, change, floor.name, beside)
    return Comparison(before, now, change, None, None)


def _find_change(
    before: float, now: float, rounds_before: Sequence[float], rounds_now: Sequence[float], *, is_less_faster: bool
) -> Change:
    ratio = before / now if is_less_faster else now / before
    if min(len(rounds_before), len(rounds_now)) < MIN_ROUNDS:
        return Change(ratio, None)
    is_apart = min(rounds_now) > max(rounds_before) or max(rounds_now) < min(rounds_before)
    return Change(ratio, is_apart)
