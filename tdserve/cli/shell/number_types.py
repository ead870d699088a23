"""Types of numbers of a command line."""

from __future__ import annotations

from typing import Any

import click

MAX_TIME = 1e9
"""Largest time that an option takes, whatever its unit: 31 years of seconds, which every clock and wait can hold."""


class TimeRange(click.FloatRange):
    """A time, in the unit that the option names. NaN and infinity are invalid: a wait would never end or fail."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number. Raises BadParameter if it is no time, or outside the range."""
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= MAX_TIME:  # of NaN, no comparison is true
            self.fail(f"{value} is not a number up to {MAX_TIME:,.0f}", param, ctx)
        return number
