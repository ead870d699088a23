"""The text of a store's settings, canonical JSON, as a peer sends it or the catalog has it."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import check_text

MAX_SETTINGS_BYTES = 1 << 16
"""Longest text: it is in the catalog, and in every description of the store."""


def read_settings(text: str, known: AbstractSet[str]) -> dict[str, Any]:
    """Returns the settings by name; none from ``""``.

    Raises:
        InvalidRequestError: The text is too long or not such JSON, or it has a name that is not known.
    """
    check_text("settings", text, max_bytes=MAX_SETTINGS_BYTES)
    try:
        values = json.loads(text) if text else {}
    except (ValueError, RecursionError) as fault:
        raise InvalidRequestError(argument="settings", reason=f"{text[:80]!r} is not JSON") from fault
    if not isinstance(values, dict) or not values.keys() <= known:
        raise InvalidRequestError(argument="settings", reason=f"{text[:80]!r} has other parts than {sorted(known)}")
    return values
