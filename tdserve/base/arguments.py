"""Checks of the numbers and keys that callers, peers and disks give for the settings of a table and its writers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
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


def to_key_path(argument: str, key: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns a key as a path; None if it is not given. JSON has lists for tuples.

    Raises:
        InvalidRequestError: It is neither a string nor a tuple of strings. Nothing was changed.
    """
    if key is None:
        return None
    parts = (key,) if isinstance(key, str) else key
    is_path = isinstance(parts, (tuple, list)) and parts and all(isinstance(part, str) and part for part in parts)
    if not is_path:
        raise InvalidRequestError(argument=argument, reason=f"{key!r} is not a key: a string or a tuple of strings")
    return tuple(parts)
