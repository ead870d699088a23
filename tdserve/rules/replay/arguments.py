"""Checks of the numbers that callers, peers and disks give for the settings of a table."""

from __future__ import annotations

import math
import numbers
from typing import Any

from tdserve.base.errors import InvalidRequestError


def to_finite_number(argument: str, value: Any) -> float:
    """Returns a finite number of at least 0 as a float, so that 1 and 1.0 are the same setting and the same text.

    Raises:
        InvalidRequestError: It is not such a number. Nothing was changed.
    """
    reason = f"{str(value)[:80]} is not a finite number of at least 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(argument=argument, reason=reason)
    try:
        number = float(value)
    except OverflowError as fault:
        raise InvalidRequestError(argument=argument, reason=reason) from fault
    if not math.isfinite(number) or number < 0:
        raise InvalidRequestError(argument=argument, reason=reason)
    return abs(number)  # -0.0 equals 0.0 and has another text
