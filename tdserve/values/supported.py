"""Defines which values travel without a pickle: a closed set of types, each of which is restored exactly. No torch.

A value of any other type is refused, subclasses too: to restore it as something else would be worse.
"""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import numpy as np

from tdserve.base.errors import NotSupportedError

MAX_DEPTH = 64
"""Containers nested inside one another. MessagePack allows more, but code that recurses into a value does not."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Types that always travel and contain no other values."""

CONTAINER_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (dict, list, tuple, collections.OrderedDict, collections.defaultdict)
}
"""Types that travel as values themselves, by name: ``TensorDict.from_pytree`` stores them. No other type does, since a
name from the wire is never imported."""

TYPE_NAMES = {kind: name for name, kind in CONTAINER_TYPES.items()}

TRAVELLING = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, NumPy arrays and scalars, and "
    "dates and times without a timezone, or with an offset without a name"
)

REMEDY = "tdserve.connect(..., allow_pickle=True)"

SETS = frozenset({set, frozenset})

SCALARS = frozenset({complex, dt.date, dt.time, dt.datetime, dt.timedelta})
"""Types of Python that also travel, as extension types."""

_CONTAINERS = SETS | {list, tuple, dict}

_ARRAY_KINDS = frozenset("biufcSUMm")
"""NumPy's dtype.kind of arrays and scalars that are their bytes: no objects, no pointers, no fields."""

UNPORTABLE = frozenset("gG")
"""NumPy's dtype.char of long double and its complex: their bytes mean something else on another machine."""

_MANY, _DEEP = 1000, 8
"""Above this number of containers on a level, or below this level, repeated containers are checked once: a list that
contains itself would otherwise grow without bound."""

_IterContent = Callable[[Collection[Any]], Iterator[Any]]

_FEW_DICTS = 8
"""A set of all their keys takes no less time than looking at the keys of so few."""


def check_values(values: Collection[Any], *, key: str = "") -> None:
    """Checks that values travel. It looks at all of them level by level, since a call for each value would be slow.

    Args:
        values: The values to check.
        key: Their key, for error messages.

    Raises:
        NotSupportedError: Names ``key`` and the type.
    """
    level: Collection[Any] = values
    kinds = set(map(type, level))
    for depth in range(MAX_DEPTH + 1):
        if ATOMS.issuperset(kinds):
            return
        for kind in kinds - ATOMS - _CONTAINERS:
            for value in level:
                if type(value) is kind:
                    check_other(value, key)
        held = [value for value in level if type(value) in _CONTAINERS] if kinds - _CONTAINERS else level
        if len(held) > _MANY or depth > _DEEP:
            held = list({id(value): value for value in held}.values())
        content: _IterContent = _iter_content if dict in kinds else chain.from_iterable
        kinds = set(map(type, content(held)))
        level = [] if ATOMS.issuperset(kinds) else list(content(held))
    raise _make_value_error(f"the value at key {key!r}", "it contains itself, or its containers are nested too deep")


def _iter_content(held: Collection[Any]) -> Iterator[Any]:
    """Yields what containers hold, keys of dicts included.

    Many dicts mostly have the same keys: each is yielded once. Where equal keys differ in type, the type that is left
    out is checked when it is encoded.
    """
    dicts = [value for value in held if type(value) is dict]
    others = [value for value in held if type(value) is not dict] if len(dicts) < len(held) else []
    keys = [set[Any]().union(*dicts)] if len(dicts) > _FEW_DICTS else dicts
    # One view of values after the other: hundreds that live together wake the garbage collector.
    return chain(chain.from_iterable(keys), chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(others))


def check_other(value: Any, key: str) -> None:
    """Checks a value that is neither an atom nor a container.

    Raises:
        NotSupportedError: Names ``key`` and the type.
    """
    kind = type(value)
    if (kind is type and value in TYPE_NAMES) or (kind in SCALARS and _has_plain_timezone(value)):
        return
    if kind is not np.ndarray and not (isinstance(value, np.generic) and kind.__module__ == "numpy"):
        reason = f"{TRAVELLING} travel; convert it"
        raise _make_value_error(f"a {kind.__module__}.{kind.__qualname__} at key {key!r}", reason)
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.char in UNPORTABLE or _is_hollow(value):
        reason = "arrays of numbers, bool, str, bytes, datetime64 and timedelta64 travel"
        raise _make_value_error(f"a NumPy value of dtype {value.dtype} at key {key!r}", reason)


def _has_plain_timezone(value: Any) -> bool:
    """Returns whether a date or time has no timezone, or one that its offset alone restores."""
    zone = getattr(value, "tzinfo", None)
    if zone is None:
        return True
    return type(zone) is dt.timezone and repr(zone) == repr(dt.timezone(zone.utcoffset(None)))


def _is_hollow(value: Any) -> bool:
    # arrays of strings without characters hold no bytes, so that no bytes could vouch for their number
    return type(value) is np.ndarray and value.dtype.itemsize == 0


def _make_value_error(feature: str, reason: str) -> NotSupportedError:
    return NotSupportedError(feature=feature, reason=f"{reason}; or use {REMEDY}")
