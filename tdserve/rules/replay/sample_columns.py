"""The columns that a sample has beside its rows; both ends derive them from a table's settings."""

from __future__ import annotations

from tdserve.messages.content import ADDED_DTYPES, POLICY_VERSION_KEY
from tdserve.rules.replay.settings import Settings


def list_added_columns(settings: Settings, *, is_grouped: bool = False) -> tuple[str, ...]:
    """Returns which of ``ADDED_DTYPES`` a sample of a table has, in order.

    Args:
        is_grouped: Whether the sample is of whole groups, instead of the sampler's draw.
    """
    names = set() if is_grouped else set(settings.sampler.adds)
    if settings.uses_priority:
        names.add("priority")
    if settings.counts_samples:
        names.add("times_sampled")
    if settings.policy:
        names.add(POLICY_VERSION_KEY)
    return tuple(name for name in ADDED_DTYPES if name in names)
