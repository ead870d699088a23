"""Checks of integers that a caller, a peer or a disk gives: numbers of rows, bytes or times, and versions."""

from __future__ import annotations

import numbers

from tdserve.base.errors import InvalidRequestError

LARGEST = 2**63 - 1
"""Largest number that a message or a file of int64 can hold."""


def to_integer(value: object) -> int | None:
    """Returns ``value`` as an integer, also if it is one of NumPy's, which computed sizes often are; None for True, 3.0
    and "3"."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def check_integer(argument: str, value: object, minimum: int, *, maximum: int = LARGEST) -> int:
    """Returns ``value`` as an integer.

    Raises:
        InvalidRequestError: It is not an integer from ``minimum`` to ``maximum``. Nothing was changed.
    """
    number = to_integer(value)
    if number is None or number < minimum:
        raise InvalidRequestError(argument=argument, reason=f"{value!r} is not an integer of at least {minimum}")
    if number > maximum:
        raise InvalidRequestError(argument=argument, reason=f"{number} is above {maximum}")
    return number


def check_version(argument: str, value: object) -> int:
    """Returns ``value`` as a version. A version that a message cannot hold is replaced by one above, or below, all
    existing ones.

    Raises:
        InvalidRequestError: It is not an integer. Nothing was asked.
    """
    number = to_integer(value)
    if number is None:
        raise InvalidRequestError(argument=argument, reason=f"{value!r} is not a version")
    return min(max(number, -1), LARGEST)
