"""Which of several servers' answers about one name counts. Imports no torch, for commands."""

from __future__ import annotations

import math

from tdserve.client.session.description import StoreDescription
from tdserve.rules.placement import PlacementRecord


def compute_lateness(description: StoreDescription) -> float:
    """Returns how late a copy of a record is; all else comes after all copies. The latest answer counts."""
    record = PlacementRecord.from_json(description.settings) if description.kind == "placement" else None
    return record.revision if record is not None and record.is_copy else math.inf
