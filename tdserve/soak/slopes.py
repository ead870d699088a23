"""Whether a figure grows: a robust slope with a confidence interval.

The slope is that of Theil and Sen: the median of the slopes between all pairs of points, which a fifth of the points
may miss by any amount. Its interval is Sen's, from the distribution of Kendall's rank correlation: it assumes nothing
of the errors but that they are as likely above as below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median
from typing import NamedTuple

CONFIDENCE = 0.99
"""Of an interval. A report has some thirty slopes: with that many, one in three reports would call one wrong at
0.95."""

MIN_POINTS = 6
"""With fewer, even points that all rise leave an interval without bounds."""


class Slope(NamedTuple):
    """A slope per hour.

    Attributes:
        per_hour: The estimate.
        low: Lower bound of its interval; minus infinity if there are too few points.
        high: Upper bound.
        level: Median of the values.
        hours: From the first point to the last.
        num_points: Their number.
    """

    per_hour: float
    low: float
    high: float
    level: float
    hours: float
    num_points: int

    def judge(self, tolerance: float) -> str:
        """Compares the growth from the first point to the last with a tolerance: ``grows`` if it is surely more,
        ``flat`` if it is surely less, ``undecided`` if there are too few points or they scatter too much."""
        if self.low * self.hours > tolerance:
            return "grows"
        return "flat" if self.high * self.hours <= tolerance else "undecided"


def fit_slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Fits a line.

    Args:
        points: Time in seconds and value, at least one.
    """
    pairs = [(one, other) for number, one in enumerate(points) for other in points[number + 1 :]]
    slopes = sorted(3600 * (y - x) / (later - sooner) for (sooner, x), (later, y) in pairs if later != sooner)
    level = median(value for _, value in points)
    hours = (points[-1][0] - points[0][0]) / 3600
    num_points = len(points)
    if num_points < MIN_POINTS or not slopes:
        return Slope(median(slopes or [0.0]), -math.inf, math.inf, level, hours, num_points)
    deviation = math.sqrt(num_points * (num_points - 1) * (2 * num_points + 5) / 18)
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation
    first = max(0, math.floor((len(slopes) - reach) / 2))
    last = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return Slope(median(slopes), slopes[first], slopes[last], level, hours, num_points)
