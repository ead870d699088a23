"""What the figures of a soak show: a slope and a verdict for each, and all of it as one document."""

from __future__ import annotations

import math
from statistics import median
from typing import Any, NamedTuple

from tdserve.soak.rounds import SoakResult
from tdserve.soak.slopes import Slope, fit_slope

MIB = 1 << 20
WARM_UP = 0.25
"""Part of the rounds of each half that is left out: caches and heaps fill."""

TOLERANCES = {"memory": 4 * MIB, "of it anonymous": 4 * MIB, "shared memory": 1 * MIB, "disk": 4 * MIB}
"""Growth of a figure, from the first round to the last of a half, that is not judged to be a leak; of a count it is
``COUNT_TOLERANCE``."""

COUNT_TOLERANCE = 2.0
RELATIVE_TOLERANCE = 0.02
"""Of the level, where that is more."""

SERVER_ROLES = ("control", "worker", "fork server", "other")


class Line(NamedTuple):
    """The slope of one figure.

    Attributes:
        kills: What was killed meanwhile: ``all`` or ``clients``.
        role: Whose it is.
        figure: Its name.
        slope: Per hour; bytes or a count.
        verdict: ``grows``, ``flat`` or ``undecided``.
    """

    kills: str
    role: str
    figure: str
    slope: Slope
    verdict: str


def judge_figures(result: SoakResult) -> list[Line]:
    """Fits a slope to each figure in each half. Figures of the server's processes are judged only in the half in which
    these processes live on."""
    found = []
    for is_calm in (False, True):
        for (role, figure), series in sorted(result.series.items()):
            points = [(point.at_s, point.value) for point in series if point.is_calm == is_calm]
            if not points or (role in SERVER_ROLES and not is_calm):
                continue
            slope = fit_slope(points[math.ceil(WARM_UP * (len(points) - 1)) :])
            tolerance = max(TOLERANCES.get(figure, COUNT_TOLERANCE), RELATIVE_TOLERANCE * slope.level)
            found.append(Line("clients" if is_calm else "all", role, figure, slope, slope.judge(tolerance)))
    return found


def make_document(result: SoakResult, lines: list[Line]) -> dict[str, Any]:
    """Returns all of it for JSON; an interval without bounds has null there."""
    findings, back_s = result.findings, result.back_s
    return {
        "verdict": find_verdict(result, lines),
        "rounds": result.num_rounds,
        "kills": dict(result.kills),
        "counts": dict(sorted(findings.counts.items())),
        "faults": findings.faults,
        "latest_call_s": findings.latest_s,
        "back_s": {"median": median(back_s), "max": max(back_s), "count": len(back_s)} if back_s else None,
        "series": [
            {
                "role": role,
                "figure": figure,
                "points": [
                    {"kills": "clients" if point.is_calm else "all", "at_s": point.at_s, "value": point.value}
                    for point in series
                ],
            }
            for (role, figure), series in sorted(result.series.items())
        ],
        "slopes": [
            {
                "kills": line.kills,
                "role": line.role,
                "figure": line.figure,
                "level": line.slope.level,
                "per_hour": line.slope.per_hour,
                "low": line.slope.low if math.isfinite(line.slope.low) else None,
                "high": line.slope.high if math.isfinite(line.slope.high) else None,
                "hours": line.slope.hours,
                "points": line.slope.num_points,
                "verdict": line.verdict,
            }
            for line in lines
        ],
    }


def find_verdict(result: SoakResult, lines: list[Line]) -> str:
    """Returns ``damaged`` if content was lost, doubled or torn, or a client failed; else ``grows`` if a figure does;
    else ``clean``."""
    if result.findings.faults:
        return "damaged"
    return "grows" if any(line.verdict == "grows" for line in lines) else "clean"
