"""How old the rows of a table's samples are: in seconds, in rows written since, and in versions of its policy.

Where a row lies in the order of commits is known exactly, when it came only for the rows of some *spans*: all rows of a
span count as come at its begin. A span lasts a second; where there are too many, two neighbours become one, those
whose distance is the smallest part of their age. So an age is wrong by a second, or by a few per cent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows

SPAN_S = 1.0
"""Least time between the begins of two spans."""

MAX_SPANS = 256
"""Most spans: from a second to a month by steps of six per cent."""

MAX_KEPT_ROWS = 4096
"""Most rows of a sample whose ages are looked at; of larger samples, rows at equal distances."""


class SampleAge(NamedTuple):
    """The ages of the rows of one sample at the moment at which it was drawn.

    Attributes:
        mean_s, max_s: Time since they were written, in seconds. Rows from before the table was opened are as old as
            that at least, and count as so old.
        mean_rows, max_rows: Rows written since.
        mean_lag, max_lag: Versions of the policy published since the one that made them; None without a policy, and if
            no version is known.
    """

    mean_s: float
    max_s: float
    mean_rows: float
    max_rows: int
    mean_lag: float | None = None
    max_lag: int | None = None


class DrawnRows(NamedTuple):
    """What is kept of the newest sample.

    Attributes:
        drawn_s: When it was drawn.
        places: The rows' places in the order of commits.
        last_place: Place of the newest row at that time.
        lags: The rows' lags behind the policy; negative: unknown; None: the table has none.
    """

    drawn_s: float
    places: Rows
    last_place: int
    lags: NDArray[np.int64] | None = None

    def thin_out(self) -> DrawnRows:
        """Returns rows at equal distances, in arrays of their own, if there are very many."""
        step = -(-len(self.places) // MAX_KEPT_ROWS)
        if step <= 1:
            return self
        lags = None if self.lags is None else self.lags[::step].copy()
        return self._replace(places=self.places[::step].copy(), lags=lags)


class RowAges:
    """When rows have come, and the rows of the newest sample.

    Args:
        num_drawn: Rows that readers have drawn by themselves until now.

    Attributes:
        num_drawn: Rows that they had drawn when a sample was last noted for them.
    """

    def __init__(self, num_drawn: int = 0) -> None:
        self.num_drawn = num_drawn
        self._firsts: list[int] = []
        self._begins_s: list[float] = []
        self._newest: DrawnRows | None = None
        self._age: SampleAge | None = None  # of the newest sample, once it was measured

    def note_rows(self, first: int, now_s: float) -> None:
        """Notes that rows come now.

        Args:
            first: Place of the first of them in the order of commits.
            now_s: The time, of a clock that never goes back.
        """
        if self._begins_s and now_s - self._begins_s[-1] < SPAN_S:
            return
        if len(self._begins_s) >= MAX_SPANS:
            self._merge_two(now_s)
        self._firsts.append(first)
        self._begins_s.append(now_s)

    def note_sample(self, drawn: DrawnRows) -> None:
        """Notes the newest sample."""
        self._newest, self._age = drawn.thin_out(), None

    def measure(self) -> SampleAge | None:
        """Returns the ages of the rows of the newest sample; None if there was none."""
        drawn = self._newest
        if self._age is None and drawn is not None and len(drawn.places) and self._begins_s:
            self._age = self._measure(drawn)
        return self._age

    def _measure(self, drawn: DrawnRows) -> SampleAge:
        spans = np.searchsorted(self._firsts, drawn.places, side="right") - 1
        ages_s = drawn.drawn_s - np.asarray(self._begins_s)[np.maximum(spans, 0)]
        ages = drawn.last_place - drawn.places
        age = SampleAge(float(ages_s.mean()), float(ages_s.max()), float(ages.mean()), int(ages.max()))
        if drawn.lags is None or not (is_known := drawn.lags >= 0).any():
            return age
        lags = drawn.lags[is_known]
        return age._replace(mean_lag=float(lags.mean()), max_lag=int(lags.max()))

    def _merge_two(self, now_s: float) -> None:
        begins_s = np.asarray(self._begins_s)
        place = int(np.argmin(np.diff(begins_s) / (now_s - begins_s[:-1]))) + 1
        del self._firsts[place], self._begins_s[place]
