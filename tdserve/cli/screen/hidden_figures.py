"""Figures of a whole server, which tokens without that right do not see: they arrive as 0 or empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_WHOLE_SERVER = frozenset(
    {
        "workers",
        "transports",
        "root",
        "root_free_bytes",
        "root_size_bytes",
        "checkpoint",
        "checkpoint_age_s",
        "checkpoint_interval_s",
        "held_bytes",
        "held_limit_bytes",
        "processes",
        "calls",
        "num_observer_restarts",
        "num_unsynced_stores",
        "sync_age_s",
    }
)
"""Facts that only a token for the whole server shows."""


def are_hidden(workers: Any) -> bool:
    """Returns whether figures with these workers leave out the whole server's: each server has a worker."""
    return not workers


def mark_hidden(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a server, or of several by their numbers, with None for those that the token hides."""
    if "servers" in facts:
        return {**facts, "servers": {server: mark_hidden(each) for server, each in facts["servers"].items()}}
    hidden = OF_WHOLE_SERVER if are_hidden(facts["workers"]) else ()
    return {name: None if name in hidden else value for name, value in facts.items()}
