"""Python objects as pickles: the only module of tdserve that pickles and unpickles users' objects.

Unpickling runs code that the bytes choose. So it happens only where a user passed ``allow_pickle=True``, and never in a
server, which keeps these bytes without looking inside.
"""

from __future__ import annotations

import pickle
from typing import Any

from tdserve.base.errors import NotSupportedError

_PROTOCOL = 5
"""Pickle protocol: the newest that every Python from 3.8 on reads."""


def dump(value: Any, *, key: str = "") -> bytes:
    """Returns the pickle of a value.

    Raises:
        NotSupportedError: Names ``key``; the object refuses. Nothing was changed.
    """
    try:
        return pickle.dumps(value, protocol=_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - an object's own __reduce__ may raise anything
        raise _make_refusal(f"pickling a {_name(value)} at key {key!r}", error) from None


def load(content: bytes | memoryview, *, key: str = "") -> Any:
    """Returns the value of a pickle. Runs whatever code the pickle names.

    Raises:
        NotSupportedError: Names ``key``; this process lacks a class or a module, or the bytes are damaged.
    """
    try:
        return pickle.loads(content)  # noqa: S301 - the user asked for it
    except Exception as error:  # noqa: BLE001 - what a pickle runs may raise anything
        raise _make_refusal(f"unpickling the value at key {key!r}", error) from None


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _make_refusal(feature: str, error: Exception) -> NotSupportedError:
    return NotSupportedError(feature=feature, reason=f"{type(error).__name__}: {error}"[:300])
