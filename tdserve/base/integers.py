"""What counts as an integer where a caller, a peer or a disk gives a number of rows, bytes, times or a version."""

from __future__ import annotations

import numbers

from tdserve.base.errors import InvalidRequestError

LARGEST = 2**63 - 1
"""What a message and a file of int64 can say."""


def integer_of(value: object) -> int | None:
    """The integer that ``value`` is, of NumPy too, with which sizes are often computed; None of True, 3.0 and "3"."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def check_integer(argument: str, value: object, minimum: int, *, maximum: int = LARGEST) -> int:
    """The integer that ``value`` is.

    Raises:
        InvalidRequestError: It is none, or none from ``minimum`` to ``maximum``. Nothing was changed.
    """
    number = integer_of(value)
    if number is None or number < minimum:
        raise InvalidRequestError(argument=argument, reason=f"{value!r} is not an integer of at least {minimum}")
    if number > maximum:
        raise InvalidRequestError(argument=argument, reason=f"{number} is above {maximum}")
    return number


def check_version(argument: str, value: object) -> int:
    """The version that ``value`` is; one that a message cannot say is above, or below, all that there are.

    Raises:
        InvalidRequestError: It is no integer. Nothing was asked.
    """
    number = integer_of(value)
    if number is None:
        raise InvalidRequestError(argument=argument, reason=f"{value!r} is no version")
    return min(max(number, -1), LARGEST)
